#!/usr/bin/env bash
# From a fresh clone to a measured acceptance length, on a CPU. Arguments go to tools/quickstart.py:
#   bash tools/quickstart.sh                                   5 to 10 minutes, byte-level target
#   bash tools/quickstart.sh --target smollm2 --minutes 60     a public language model as the target
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source tools/environment.sh
prepare_environment
exec "$PYTHON" tools/quickstart.py "$@"
