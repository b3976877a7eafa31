from nbattn import cascade as cascade
from nbattn import oracle as oracle
from nbattn import testing as testing
from nbattn.append import append_paged_kv_cache as append_paged_kv_cache
from nbattn.cascade import (
    BatchDecodeWithSharedPrefixPagedKVCacheWrapper as BatchDecodeWithSharedPrefixPagedKVCacheWrapper,
)
from nbattn.cascade import (
    BatchPrefillWithSharedPrefixPagedKVCacheWrapper as BatchPrefillWithSharedPrefixPagedKVCacheWrapper,
)
from nbattn.cascade import MultiLevelCascadeAttentionWrapper as MultiLevelCascadeAttentionWrapper
from nbattn.cross_attention import PagedKVCollection as PagedKVCollection
from nbattn.cross_attention import generic_cross_attention_kv_cache as generic_cross_attention_kv_cache
from nbattn.engine import plan as plan
from nbattn.errors import ContractError as ContractError
from nbattn.errors import PageTableError as PageTableError
from nbattn.errors import TargetError as TargetError
from nbattn.fixed_cache import gqa_decode as gqa_decode
from nbattn.gather import gather_attention as gather_attention
from nbattn.kv_cache import PagedKV as PagedKV
from nbattn.merging import merge_state as merge_state
from nbattn.merging import merge_state_in_place as merge_state_in_place
from nbattn.merging import merge_states as merge_states
from nbattn.over_cache import attention_over_cache as attention_over_cache
from nbattn.paged import cascade_attention as cascade_attention
from nbattn.paged import paged_attention as paged_attention
from nbattn.planning import Plan as Plan
from nbattn.problem import Level as Level
from nbattn.problem import Rope as Rope
from nbattn.sparse_attention import qsa_sparse_attention as qsa_sparse_attention
from nbattn.threads import get_num_threads as get_num_threads
from nbattn.threads import set_num_threads as set_num_threads
from nbattn.warming import warmup as warmup

__version__: str
