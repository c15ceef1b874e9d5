"""What an adapter's configuration says: which adapters can't be merged, and why."""

from typing import Any

from .architecture import Architecture
from .checkpoint import Checkpoint

PREFIX = "base_model.model."
# Options of peft that change the base's own weights or add other terms than B A.
_REFUSED = {
    "lora_bias": "lora_bias",
    "use_qalora": "QALoRA",
    "kasa_config": "KaSA, which truncates the base",
}
# Options with which an adapter is no change of the base's weights, so that peft can't merge it.
_NO_CHANGE_OF_WEIGHTS = {
    "arrow_config": "Arrow, which mixes several adapters by the input",
    "layer_replication": "layer_replication, which adds layers",
    "alora_invocation_tokens": "activated LoRA, which acts on some tokens only",
}
# Kinds of adapters that add to the input or choose among adapters, which peft can't merge either.
_WITHOUT_WEIGHTS = (
    "PROMPT_TUNING",
    "MULTITASK_PROMPT_TUNING",
    "P_TUNING",
    "PREFIX_TUNING",
    "ADAPTION_PROMPT",
    "CPT",
    "POLY",
    "XLORA",
)
_REFUSED_INITS = ("pissa", "olora", "corda", "loftq", "lora_ga")
WITH_PEFT = "with peft (merge_and_unload), and give that folder"
SAVE_AGAIN = "save it again from the model that was trained"
COPY_HEAD = (
    "copy the embedding of its base into the head, and save that with tie_word_embeddings=False"
)


def check_config(checkpoint: Checkpoint, architecture: Architecture) -> None:
    """Raise a ValueError if an adapter is of a kind that can't be merged."""
    # The raw file is read, since peft drops fields that it does not know.
    config: Any = checkpoint.adapter_config
    adapter = f"adapter '{checkpoint.name}'"
    kind = config.get("peft_type")
    if kind in _WITHOUT_WEIGHTS:
        raise ValueError(
            f"{adapter} is of type {kind}: only LORA can be merged, and it changes no weights"
        )
    if kind != "LORA":
        raise ValueError(
            f"{adapter} is of type {kind}: only LORA can be merged; "
            f"{with_peft(checkpoint, architecture)}"
        )
    for option, meaning in _NO_CHANGE_OF_WEIGHTS.items():
        if config.get(option):
            raise ValueError(f"{adapter} uses {meaning}: it can't be merged")
    # Before the loop, which sends to peft: what peft can't merge either must not get that remedy.
    if config.get("lora_bias"):
        _check_biases(checkpoint, architecture)
    for option, meaning in _REFUSED.items():
        if config.get(option):
            raise ValueError(f"{adapter} uses {meaning}: {with_peft(checkpoint, architecture)}")
    initialisation = str(config.get("init_lora_weights", True))
    # By their start, since PiSSA's may end in a number of iterations: pissa_niter_16.
    if initialisation.startswith(_REFUSED_INITS):
        raise ValueError(
            f"{adapter} was initialised with {initialisation}, which changes the base as well: "
            "save it with peft's path_initial_model_for_weight_conversion"
        )


def _check_biases(checkpoint: Checkpoint, architecture: Architecture) -> None:
    """Refuse an adapter that adds a bias to a module without one, which peft can't merge either."""
    for key in checkpoint.tensors:
        module, has_bias, _ = key.removeprefix(PREFIX).partition(".lora_B.bias")
        if has_bias and not architecture.rows(architecture.param(f"{module}.bias")):
            raise ValueError(
                f"adapter '{checkpoint.name}' uses lora_bias, and '{module}' of the base has no "
                "bias: it can't be merged"
            )


def with_peft(adapter: Checkpoint, architecture: Architecture) -> str:
    """Return the end of a message about an adapter that only peft can merge.

    Into a weight that several modules share, peft adds the updates of all of them.
    """
    for names in architecture.shared:
        for name in names:
            module = name.rpartition(".")[0]
            # With dots at both ends, since 'head' must not be found in 'lm_head'.
            if any(f".{module}." in f".{key}" for key in adapter.tensors):
                return f"{COPY_HEAD}, merge it into that {WITH_PEFT}"
    return f"merge it into its base {WITH_PEFT}"
