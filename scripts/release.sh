#!/usr/bin/env bash
# Build wheel and sdist, and try them as users will: `make release`, or `bash scripts/release.sh 2.6.0 2.13.0` with
# the versions of torch to try. Each is installed into an environment of its own, under dist/.
set -euo pipefail
cd "$(dirname "$0")/.."
python=.venv/bin/python
$python scripts/check_release.py
rm -rf dist
$python -m build --quiet --outdir dist .
wheel=$(ls dist/*.whl)
$python -m twine check --strict dist/*

for torch in "${@:-2.13.0}"; do
    env=dist/torch-$torch
    python3 -m venv "$env"
    "$env/bin/python" -m pip install --quiet --disable-pip-version-check "torch==$torch" "$wheel"
    (cd "$env" && bin/python ../../scripts/smoke.py)
done

# The types as a user's checker sees them: from the wheel, not from this folder.
"$env/bin/python" -m pip install --quiet --disable-pip-version-check mypy
cp tests/typing/user_code.py "$env/user_code.py"
(cd "$env" && bin/python -m mypy --strict user_code.py)
printf '{"include": ["user_code.py"], "typeCheckingMode": "strict", "venvPath": "..", "venv": "torch-%s"}' "$torch" > "$env/pyrightconfig.json"
.venv/bin/pyright --project "$env"
echo "ready: $(ls dist/*.whl dist/*.tar.gz | tr '\n' ' ')"
