"""One rank of a training job: the recipes' own entry point, on a machine without a GPU."""

import sys

from tests.recipes.bridge_on_cpu import import_bridge, let_bridge_train

if __name__ == "__main__":
    import_bridge()
    let_bridge_train()
    from megatron_splitkv.recipes.pretrain import main

    main(sys.argv[1:])
