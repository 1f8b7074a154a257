#!/usr/bin/env bash
# The work of `make setup`: everything the project needs, in .venv/ at the root; Chromium from the system's packages or
# by Playwright's own download.  Idempotent: done already, it answers in a second and needs no network.
set -uo pipefail
cd "$(dirname "$0")/.." || exit 1

VENV=.venv
LOG=$VENV/setup.log
STAMP=$VENV/setup.stamp
PY=$VENV/bin/python
UV=0.13.9
export PIP_DISABLE_PIP_VERSION_CHECK=1

say() { printf 'setup: %s\n' "$*"; }
die() { printf 'setup: %s\n' "$*" >&2; exit 1; }
root() { [ "$(id -u)" = 0 ]; }

# stage "what" REMEDY command...: runs it with its output in the log, tells the seconds; on failure says the remedy.
stage() {
    local what=$1 remedy=$2 began=$SECONDS child status
    shift 2
    printf '\n### %s: %s\n' "$what" "$*" >>"$LOG"
    set -m # a process group of its own, so that an interrupt ends all of it
    "$@" >>"$LOG" 2>&1 </dev/null &
    child=$!
    set +m
    trap 'kill -- -"$child" 2>/dev/null; printf "\nsetup: interrupted; run it again to go on\n" >&2; exit 130' INT TERM
    while kill -0 "$child" 2>/dev/null; do
        if [ -t 1 ]; then printf '\rsetup: %s … %d s ' "$what" $((SECONDS - began)); fi
        sleep 0.5
        if [ ! -t 1 ] && [ $(((SECONDS - began) % 30)) = 29 ]; then say "$what … $((SECONDS - began)) s"; sleep 1; fi
    done
    wait "$child"
    status=$?
    trap - INT TERM
    if [ -t 1 ]; then printf '\r\033[K'; fi
    if [ "$status" != 0 ]; then
        grep -v -E '^WARNING: Location|^$|^###' "$LOG" | tail -n 6 | sed 's/^/    /' >&2
        die "$what failed: $remedy (all of its output: $LOG)"
    fi
    say "$what: $((SECONDS - began)) s"
}

[ "$(uname -s)" = Linux ] || die "this is $(uname -s): it runs on Linux only (SGLang, Megatron and Slurm do)"

# --- What is there --------------------------------------------------------------------------------------------------

suits() { # PYTHON: a version that fits, able to make environments
    "$1" -c 'import ensurepip, sys, venv; sys.exit(not (3, 12) <= sys.version_info[:2] < (3, 14))' >/dev/null 2>&1
}

find_python() {
    local candidate
    for candidate in python3.12 python3.13 python3 python \
        "${PYENV_ROOT:-$HOME/.pyenv}"/versions/3.12.*/bin/python "${PYENV_ROOT:-$HOME/.pyenv}"/versions/3.13.*/bin/python; do
        if suits "$candidate"; then command -v "$candidate"; return; fi
    done
    if command -v uv >/dev/null; then
        candidate=$(uv python find --no-project '>=3.12,<3.14' 2>/dev/null) ||
            { uv python install 3.12 >&2 && candidate=$(uv python find --no-project 3.12 2>/dev/null); }
        if suits "$candidate"; then echo "$candidate"; return; fi
    fi
    return 1
}

# Runs, and is no stub that only advises to install a snap.
is_chromium() { [ -x "$1" ] && timeout 20 "$1" --version 2>/dev/null </dev/null | grep -q -i 'chrom'; }

find_chromium() {
    local name downloads=${PLAYWRIGHT_BROWSERS_PATH:-$HOME/.cache/ms-playwright}
    for name in chromium-headless-shell chromium chromium-browser google-chrome; do
        name=$(command -v "$name") && is_chromium "$name" && echo "$name" && return
    done
    for name in /usr/lib/chromium/chromium-headless-shell "$downloads"/chromium_headless_shell-*/*/*headless*shell; do
        is_chromium "$name" && echo "$name" && return
    done
    return 1
}

fonts_there() { [ -n "$(find /usr/share/fonts /usr/local/share/fonts "$HOME/.fonts" "$HOME/.local/share/fonts" \
    \( -name '*.ttf' -o -name '*.otf' -o -name '*.pfb' \) -print -quit 2>/dev/null)" ]; }

if command -v nvidia-smi >/dev/null && nvidia-smi -L 2>/dev/null | grep -q '^GPU'; then device=gpu; else device=cpu; fi
wanted=$( (pwd; echo "$device"; cat setup.py scripts/setup.sh requirements/*.txt) | cksum)
if [ -f "$STAMP" ] && [ "$(cat "$STAMP")" = "$wanted" ] && suits "$PY" && find_chromium >/dev/null; then
    say "done already ($VENV, $device)"
    exit 0
fi

# --- Python environment ----------------------------------------------------------------------------------------------

began_all=$SECONDS
if ! { suits "$PY" && "$PY" -m pip --version >/dev/null 2>&1; }; then
    python=$(find_python) || die "no Python ≥3.12 and <3.14 that can make environments was found on PATH, in pyenv or through" \
        "uv: install one (apt-get install python3.12 python3.12-venv where the system has it, pyenv install 3.12, or install uv)"
    if [ -e "$VENV" ]; then
        say "$VENV does not run (half made, or its Python is gone or of another version): it is made anew"
        rm -rf "$VENV"
    fi
    need=$([ "$device" = gpu ] && echo 16 || echo 9)
    free=$(($(df -Pk . | awk 'NR == 2 {print $4}') / 1048576))
    [ "$free" -ge "$need" ] || die "$PWD has $free GB free, and $need GB are needed: make room or clone to a larger disk"
    say "Python: $python"
    "$python" -m venv "$VENV" || die "$python -m venv $VENV failed (above): install its venv module or another Python"
fi
rm -f "$STAMP"
: >"$LOG"
again="check the network and the disk's free space, then run it again"
if [ "$device" = cpu ]; then
    lock=(-c requirements/lock.txt)
    engine=(-r requirements/sglang-cpu.txt)
else
    lock=()
    engine=("$(grep '^sglang==' requirements/gpu.txt)")
fi

# uv installs five times faster than pip, but does not read pip's configuration: a mirror named there holds here too.
pip_setting() { "$PY" -m pip config list 2>/dev/null | sed -n "s/^[^.]*\.$1='\(.*\)'\$/\1/p" | head -n 1; }
uv_install() { "$PY" -m uv pip install --python "$PY" "$@"; }
export UV_CACHE_DIR=${UV_CACHE_DIR:-$PWD/$VENV/cache} # on the same disk, so that files are linked instead of copied
export UV_INDEX_STRATEGY=unsafe-best-match            # pip's way with several indexes
for pair in index-url:UV_DEFAULT_INDEX extra-index-url:UV_INDEX find-links:UV_FIND_LINKS cert:SSL_CERT_FILE; do
    name=${pair#*:} found=$(pip_setting "${pair%:*}")
    [ "$name" = UV_FIND_LINKS ] && found=${found// /,}
    if [ -z "${!name:-}" ] && [ -n "$found" ]; then export "$name=$found"; fi
done

say "no download is shown in detail; a few minutes on two cores, 8 GB in $VENV"
stage "Installer (uv)" "$again" "$PY" -m pip install -q "uv==$UV"
stage "PyTorch, Megatron, Ray, SGLang's requirements and the rest ($device)" "$again" \
    uv_install "${lock[@]}" -r requirements/main.txt -r requirements/dev.txt setuptools "${engine[@]}"
stage "SGLang, MiniWoB++ and this package" "$again" \
    uv_install --no-deps --no-build-isolation -r requirements/no-deps.txt -e .
if [ "$device" = gpu ] && ! "$PY" -c 'import transformer_engine.pytorch' >/dev/null 2>&1; then
    # Its PyTorch part is compiled here; Megatron has layers of its own for where that cannot be done.
    ( stage "transformer-engine (compiled here, may take many minutes)" "going on with Megatron's own layers; it wants nvcc and cuDNN's headers" \
        uv_install --no-build-isolation "$(grep '^transformer-engine' requirements/gpu.txt)" ) || [ $? != 130 ] || exit 130
fi
rm -rf "$VENV/cache"

# What runs later is imported once: a broken installation shows itself now, and byte code is kept of just what is used.
first_import() {
    unset PYTHONDONTWRITEBYTECODE
    local trainer status standin=""
    [ "$device" = cpu ] && standin=megatron_webrl/engine/standin
    "$PY" -W ignore -c 'import matplotlib.pyplot, megatron_webrl.launch.roles, megatron_webrl.trainer, playwright.async_api, ray, wandb' &
    trainer=$!
    SGLANG_USE_CPU_ENGINE=${standin:+1} PYTHONPATH=$standin "$PY" -W ignore -c 'import sglang.launch_server, sglang.srt.models.qwen3_vl
import sglang.srt.entrypoints.http_server, sglang.srt.managers.detokenizer_manager, sglang.srt.managers.scheduler'
    status=$?
    wait "$trainer" && [ "$status" = 0 ]
}
stage "First import" "the environment is broken: remove $VENV and run it again" first_import

# --- Chromium and fonts ----------------------------------------------------------------------------------------------

apt_install() { # PACKAGE...: true if they were installed
    root && command -v apt-get >/dev/null || return 1
    export DEBIAN_FRONTEND=noninteractive
    apt-get update -qq
    apt-get install -y -qq --no-install-recommends "$@"
}
install_chromium() { # Debian has the headless shell as a package; Ubuntu's chromium is only a stub for a snap.
    apt_install chromium-headless-shell fonts-liberation && return
    if root; then
        "$PY" -m playwright install --with-deps chromium-headless-shell
    else
        "$PY" -m playwright install chromium-headless-shell
    fi
}
if ! find_chromium >/dev/null; then
    stage "Chromium headless shell" "install it (Debian, as root: apt-get install chromium-headless-shell; elsewhere: $PY -m playwright install \
--with-deps chromium-headless-shell), then run it again" install_chromium
    find_chromium >/dev/null || die "Chromium was installed but does not run: install the libraries it lacks" \
        "(as root: $PY -m playwright install-deps chromium-headless-shell), then run it again"
fi
if ! fonts_there; then
    ( stage "Fonts" "pages will show no text until there are fonts (Debian, Ubuntu, as root: apt-get install fonts-liberation)" \
        apt_install fonts-liberation ) || [ $? != 130 ] || exit 130
fi

echo "$wanted" >"$STAMP"
say "done in $((SECONDS - began_all)) s: Chromium is $(find_chromium)"
