#!/usr/bin/env bash
# The work of `make test`: the fast tests, then the end-to-end tests, even if the first fail; fails if either does.
# Ends with what was run and what was not, and pytest's own closing lines.
set -uo pipefail
cd "$(dirname "$0")/.." || exit 1

logs=$(mktemp -d)
trap 'rm -rf "$logs"' EXIT
failed=0

run() { # NAME MARKERS [OPTION...]: exit code 5 (no test selected) fails the fast stage only
    echo "== $1 tests"
    .venv/bin/python -m pytest -m "$2" "${@:3}" 2>&1 | tee "$logs/$1"
    local status=${PIPESTATUS[0]}
    case $status in
        0) said="$said $1: passed." ;;
        5) said="$said $1: none."; [ "$1" = fast ] && failed=1; : >"$logs/$1" ;;
        *) said="$said $1: FAILED."; failed=1 ;;
    esac
}

said=""
# One process a core, four at most (each imports torch); the end-to-end tests fill the machine by themselves.
cores=$(nproc)
run fast "not e2e and not slurm and not soak" -n $((cores > 4 ? 4 : cores)) --dist loadfile
run end-to-end "e2e and not slurm and not soak"
if grep -rqs 'pytest.mark.slurm' tests; then
    said="$said Slurm: not run here (pytest -m slurm)."
else
    said="$said Slurm: not run (no test needs it yet)."
fi
echo "== make test:$said Soak: not run (make soak)."
for stage in fast end-to-end; do grep -E '[0-9]+ (passed|failed|errors?).* in [0-9.]+s' "$logs/$stage" | tail -n 1; done
exit "$failed"
