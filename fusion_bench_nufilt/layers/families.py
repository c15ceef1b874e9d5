"""The families of models that ``target_modules: auto`` knows."""

_VLM = "vision-language model, whose vision tower and projector count as other parameters"
# What `target_modules: auto` picks. The first family whose mark is found among the names of the linear modules
# wins. CLIP and T5: the authors' settings. Others: all linear layers in the numbered blocks of the language model.
FAMILIES = (
    ("T5", r".*\.DenseReluDense\..*", r".*\.(SelfAttention|EncDecAttention|DenseReluDense)\..*"),
    (_VLM, r"(.*\.)?language_model\..*", r"(.*\.)?language_model\.(.*\.)?\d+\..*"),
    (_VLM, r"(.*\.)?(vision_tower|visual)\..*", r"(?!.*(vision_tower|visual))(.*\.)?\d+\..*"),
    ("CLIP vision tower", r"(?!.*text_model)(.*\.)?encoder\.layers\.\d+\.mlp\.fc1", r"(?!.*text_model).*(attn|fc1).*"),
    ("transformer", r"(.*\.)?\d+\..*", r"(.*\.)?\d+\..*"),
)
