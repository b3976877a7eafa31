cd "$(dirname "$0")"
python3 -c "import pytest, hypothesis; print('pytest', pytest.__version__)"
timeout 112 python3 scripts/gpu_check.py --parts graphs,append,readme --json $OUT/check_b.json > $OUT/check_b.txt 2>&1 &
timeout 112 python3 scripts/gpu_check.py --parts small_inputs --json $OUT/check_a.json 2>&1 | cut -c1-400
wait
timeout 40 python3 - <<'PY'
import sys; sys.path.insert(0, "scripts")
import gpu_check
for o in gpu_check._few_strided(): print(o["name"], o["passed"], round(o["share"], 3), o["detail"][-500:])
PY
tail -c 1500 $OUT/check_b.txt
rm $OUT/check_b.txt
python3 - <<'PY'
import json, os
for part in "ab":
    try: r = json.load(open(os.environ["OUT"] + f"/check_{part}.json"))
    except Exception as e: print(part, e); continue
    for name, p in r["parts"].items():
        print(name, {k: p[k] for k in ("checks", "failed", "seconds")})
        for n in p["notes"]: print("  ", n)
        for f in p["failures"]: print("  FAIL", f["name"][-110:], "|", f["detail"].strip().splitlines()[-1][-160:] if f["detail"].strip() else "")
PY
