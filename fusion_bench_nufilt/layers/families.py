"""The families of models that ``target_modules: auto`` knows, and the layers that it merges in them."""

from typing import NamedTuple


class Family(NamedTuple):
    """One kind of models, and the layers that ``auto`` merges in them."""

    name: str
    mark: str  # a regular expression for the name of a module that only such models have
    pattern: str  # a regular expression for the names of the layers to merge
    convolutions: bool = False  # whether convolutions are merged, too


_VLM = "vision-language model, whose vision tower and projector count as other parameters"
_BLOCKS = r"(.*\.)?\d+\..*"  # inside a numbered block
# The first family that fits wins. CLIP and T5 have the authors' settings, the others all projections in blocks.
FAMILIES = (
    Family("T5", r".*\.DenseReluDense\..*", r".*\.(SelfAttention|EncDecAttention|DenseReluDense)\..*"),
    Family(_VLM, r"(.*\.)?language_model\..*", r"(.*\.)?language_model\.(.*\.)?\d+\..*"),
    Family(
        "OpenCLIP vision tower",
        r"(.*\.)?visual\.transformer\.resblocks\.\d+\.attn\.in_proj\.q",
        r"(.*\.)?visual\.transformer\.resblocks\.\d+\.(attn\..*|mlp\.c_fc)",
    ),
    Family(_VLM, r"(.*\.)?(vision_tower|visual)\..*", r"(?!.*(vision_tower|visual))(.*\.)?\d+\..*"),
    Family(
        "CLIP vision tower", r"(?!.*text_model)(.*\.)?encoder\.layers\.\d+\.mlp\.fc1", r"(?!.*text_model).*(attn|fc1).*"
    ),
    Family("ConvNeXt", r"(.*\.)?stages\.\d+\..*\.(dwconv|conv_dw)", _BLOCKS, convolutions=True),
    Family("transformer", _BLOCKS, _BLOCKS),
    Family("convolutional network", _BLOCKS, _BLOCKS, convolutions=True),
)
