"""The inner side of `probe`: runs one inspection and writes its answer into a file."""

import json
import sys
from importlib import import_module
from pathlib import Path

if __name__ == "__main__":
    name, file, *arguments = sys.argv[1:]
    inspect = getattr(import_module("megatron_splitkv.doctor.inspections"), name)
    Path(file).write_text(json.dumps(inspect(*arguments)))
