"""Which linear layers of a model are merged."""

import re
from typing import Dict, List, Union

from torch import nn

# The layers that the authors merge in the two families of the paper.
AUTO = {
    "T5": r".*\.(SelfAttention|EncDecAttention|DenseReluDense)\..*",
    "CLIP vision tower": r"(?!.*text_model)(.*\.)?encoder\.layers\.\d+\."
    r"(self_attn\..*|mlp\.fc1)",
}


def select_layers(
    model: nn.Module, target_modules: Union[str, List[str]] = "auto"
) -> Dict[str, nn.Linear]:
    """
    Return the linear layers to merge by name; a weight that layers share comes once.

    Args:
        model: the pretrained model.
        target_modules: "auto" for the authors' layers of CLIP and T5; "all-linear" for
            every linear layer but the output head; a list of names, whole or from a dot
            on ("q_proj"); or one regular expression for the whole name.

    Raises:
        ValueError: no layer is left, an entry of a list names none, "auto" does not
            know the model, or a weight is quantised.
    """
    layers = {}
    weights = set()
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear) and id(module.weight) not in weights:
            weights.add(id(module.weight))
            layers[name] = module

    def matching(pattern: str) -> Dict[str, nn.Linear]:
        return {name: x for name, x in layers.items() if re.fullmatch(pattern, name)}

    if target_modules == "all-linear":
        head = getattr(model, "get_output_embeddings", lambda: None)()
        chosen = {name: x for name, x in layers.items() if x is not head}
    elif target_modules == "auto":
        candidates = [matching(pattern) for pattern in AUTO.values()]
        chosen = next(filter(None, candidates), {})
        if not chosen:
            raise ValueError(
                f"target_modules=auto knows {' and '.join(AUTO)}, and not "
                f"{type(model).__name__}: say all-linear, or name modules ([q_proj])"
            )
    elif isinstance(target_modules, str):
        chosen = matching(target_modules)
    else:
        for word in target_modules:
            if not matching(rf"(.*\.)?{re.escape(word)}"):
                raise ValueError(f"'{word}' of target_modules names no linear layer")
        chosen = matching(rf"(.*\.)?({'|'.join(map(re.escape, target_modules))})")
    if not chosen:
        raise ValueError(f"{target_modules=} names no linear layer")
    for name, layer in chosen.items():
        if not layer.weight.is_floating_point() or layer.weight.element_size() < 2:
            raise ValueError(
                f"layer '{name}' is {layer.weight.dtype}: quantised weights can't be "
                "merged"
            )
    return chosen
