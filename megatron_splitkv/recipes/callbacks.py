"""What Megatron-Bridge's ``pretrain()`` has to tell the packs of a drafter."""

from megatron.bridge.training.callbacks import Callback, CallbackContext


class DealPacks(Callback):
    """Lets packs be dealt evenly to data-parallel replicas: ``callbacks=[DealPacks()]``.

    A global batch is dealt from where its first pack stands, which a resumed run finds in its
    checkpoint. Bridge reads the checkpoint before it builds datasets, but hands them nothing of it.
    """

    def on_data_init_start(self, context: CallbackContext) -> None:
        """Tell the dataset how many packs were consumed.

        Args:
            context: Bridge's, with the state of the checkpoint.
        """
        state = context.state
        done, validation = state.train_state, state.cfg.validation
        # As Bridge's sampler of held-out packs begins.
        valid = 0 if validation.skip_train else done.consumed_valid_samples
        state.cfg.dataset.continue_after(done.consumed_train_samples, valid)
