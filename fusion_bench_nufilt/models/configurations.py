"""Configurations: what two models compute otherwise, though their tensors have the same names and
shapes.

transformers 4 and 5 write one model in different ways, and leave out what is their default. So two
configurations are compared as transformers reads them, if it knows their type.
"""

import json
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from copy import deepcopy
from typing import Any

from fusion_bench_nufilt.utils.files import printable
from fusion_bench_nufilt.utils.manifest import Difference, differences

Config = Mapping[str, Any]
"""The content of a config.json, or of a part of it such as ``text_config``."""

# Names and numbers of labels and tokens; how weights are stored; names and versions; how a model is
# trained and started; caches; what it gives back. None of it changes what a merged model computes.
_IDLE = re.compile(
    r"id2label|label2id|num_labels|problem_type|finetuning_task|num_classes|label_\w+"
    r"|\w*vocab_size\w*|\w*token_(id|ids|index)|tokenizer_class|prefix|task_specific_params"
    r"|(torch_)?dtype|quantization_config|compression_config|tie_word_embeddings"
    r"|_?name_or_path|_commit_hash|architectures|auto_map|custom_pipelines|pretrained_cfg"
    # With the number of heads, which counts, it follows from the shapes of tensors.
    r"|head_dim"
    r"|\w*_(version|fixed)|\w*(attn|experts)_implementation\w*|pretraining_tp|torchscript"
    r"|\w*drop\w*|initializer_\w+|\w*_init(_value)?|\w*init_std|\w*aux_loss\w*|\w*jitter\w*"
    r"|use_cache|cache_\w+|\w*gradient_checkpointing\w*|(use_)?return_dict"
    r"|output_(attentions|hidden_states|past|router_logits)"
)


def config_differences(base: Config, task: Config) -> list[Difference]:
    """Return the fields in which a task's configuration computes something else than the base's;
    ``stored`` is the base's value.

    If one of the two is of a part of the other, such as a language model beside one that also sees,
    that part is compared. Where there is none, the only difference is their ``model_type``. A field
    that one of them lacks, after defaults are filled in, is none that its class reads.
    """
    if base == task:
        return []
    whole_base = _as_read(base)
    whole_task = _as_read(task)
    parts = _same_part(whole_base, whole_task)
    if parts is None:
        return [Difference("model_type", _type(whole_base), _type(whole_task))]
    return differences(*_common(*parts))


def check_configuration(
    name: str, config: Config, base: Config, *, verify: bool, remedy: str
) -> list[str]:
    """Refuse a model of another type than the base's, and warn of all else that its configuration
    computes otherwise.

    Args:
        name: the model's.
        config: the content of its config.json, or of that of an adapter's base; empty if there is
            none.
        base: that of the base, which the result has.
        verify: whether another type is refused; else it is one more warning.
        remedy: how that is said, where the user gives options.

    Raises:
        ValueError: the model, or the part of it that is merged, is of another type.
    """
    changes = []
    for difference in config_differences(base, config):
        field = difference.name
        of_base = _short(difference.stored)
        of_model = _short(difference.wanted)
        if field.rpartition(".")[2] == "model_type" and verify:
            raise ValueError(
                f"model '{name}' is of {field} {of_model}, and the base of {of_base}: "
                f"name the base that it was trained from, or {remedy} to merge "
                "it all the same"
            )
        changes.append(f"{field} {of_model} instead of {of_base}")
    if not changes:
        return []
    return [
        f"'{name}' computes otherwise than the base, whose configuration the result has: "
        f"{', '.join(changes)}"
    ]


def _short(value: Any) -> str:
    text = printable(repr(value))
    if len(text) > 60:
        return f"{text[:57]}..."
    return text


def _type(config: Config) -> str:
    return str(config.get("model_type") or "")


def _as_read(config: Config) -> dict[str, Any]:
    """Return a configuration as transformers reads and writes it, with all defaults; as it is, if
    transformers does not know its type.
    """
    from transformers import CONFIG_MAPPING, GenerationConfig

    content = deepcopy(dict(config))
    try:
        kind = CONFIG_MAPPING[_type(content)]
        with _silent_transformers():
            known_fields = kind().to_dict()
            read = kind.from_dict(_with_rope_as_in(content, known_fields))
            # As a file has it, where Aria's keys that are numbers in memory are texts.
            content = json.loads(read.to_json_string(use_diff=False))
    # A type of the model's own code, or values that its class refuses.
    except Exception:
        pass
    # Of texts that are generated, which older versions kept in the same file.
    for field in GenerationConfig().to_dict():
        content.pop(field, None)
    return content


@contextmanager
def _silent_transformers() -> Iterator[None]:
    """Keep what transformers says of a configuration for the one that it builds a model of."""
    from transformers import logging

    verbosity = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)


def _with_rope_as_in(content: Config, known_fields: Config) -> dict[str, Any]:
    """Return a configuration that gives rotary embeddings by the fields that its class knows.

    transformers 5 writes one field, ``rope_parameters``, for what transformers 4 has as
    ``rope_theta`` and ``rope_scaling``; the former reads both, the latter its own alone.
    """
    result = {}
    for field, value in content.items():
        known = known_fields.get(field)
        if isinstance(value, dict) and isinstance(known, dict):
            value = _with_rope_as_in(value, known)
        result[field] = value
    rope = result.get("rope_parameters")
    if not isinstance(rope, dict) or "rope_theta" not in known_fields:
        return result
    del result["rope_parameters"]
    scaling = dict(rope)
    for field in ("rope_theta", "partial_rotary_factor"):
        if field in scaling:
            result[field] = scaling.pop(field)
    if scaling.get("rope_type", "default") != "default":
        result["rope_scaling"] = scaling
    return result


def _same_part(base: Config, task: Config) -> tuple[Config, Config] | None:
    """Return the parts of two configurations that are of one type, if there are such parts."""
    if _type(base) == _type(task) or not (_type(base) and _type(task)):
        return base, task
    for part in _parts(base):
        if _is_part(part, base, _type(task)):
            return part, _without_type(task)
    for part in _parts(task):
        if _is_part(part, task, _type(base)):
            return base, _without_type(part)
    return None


def _parts(config: Config) -> Iterator[Config]:
    """Yield the parts of a configuration that have a type, such as ``text_config``."""
    for value in config.values():
        if isinstance(value, Mapping):
            if _type(value):
                yield value
            yield from _parts(value)


def _is_part(part: Config, whole: Config, alone: str) -> bool:
    """Tell whether a part of a model is of a type that there is alone, too: the language model in a
    Qwen2-VL is a ``qwen2_vl_text``, and alone a ``qwen2``.
    """
    # transformers 4 gives the vision tower of a Qwen2-VL the type of the whole.
    if _type(part) == _type(whole):
        return False
    return set(alone.split("_")) <= set(_type(part).split("_"))


def _without_type(config: Config) -> Config:
    return {field: value for field, value in config.items() if field != "model_type"}


def _common(base: Config, task: Config) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the fields that two configurations have in common and that are not idle."""
    of_base = {}
    of_task = {}
    for field in base:
        if field not in task or _IDLE.fullmatch(field):
            continue
        of_base[field] = base[field]
        of_task[field] = task[field]
        if isinstance(base[field], Mapping) and isinstance(task[field], Mapping):
            of_base[field], of_task[field] = _common(base[field], task[field])
    return of_base, of_task
