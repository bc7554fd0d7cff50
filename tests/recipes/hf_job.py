"""A public drafter into a model on all ranks and out again, by Bridge; started by torchrun."""

import sys
from pathlib import Path

import torch

from tests.recipes.bridge_on_cpu import import_bridge


def main(folder: Path) -> None:
    """Load ``folder / "public"`` over tensor parallelism and save what comes out again."""
    import_bridge()
    from megatron.bridge.models.conversion.model_bridge import get_model_bridge

    from megatron_splitkv.export.bridge import DFlashBridge, DrafterFolder
    from tests.drafter.harness import build_model, parallel_state

    torch.distributed.init_process_group("gloo")
    ranks = torch.distributed.get_world_size()
    with parallel_state(ranks, 1):
        model = build_model(ranks, 1)
        source = DrafterFolder(folder / "public")
        assert isinstance(get_model_bridge("DFlashDraftModel", source.config), DFlashBridge)
        assert DFlashBridge().provider_bridge(source).num_query_groups == 2
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.fill_(torch.nan)
        DFlashBridge().load_weights_hf_to_megatron(source, [model])
        streamed = DFlashBridge().stream_weights_megatron_to_hf([model], source)
        out = {name: tensor.clone() for name, tensor in streamed}
        if torch.distributed.get_rank() == 0:
            shard = dict(model.named_parameters())
            torch.save({"out": out, "shard": shard}, folder / "result.pt")
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
