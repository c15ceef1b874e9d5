"""How cases are drawn: everything that a user could mean, and nothing else."""

import transformers
from hypothesis import strategies as st

from tests.oracle.cases import (
    BUILDERS,
    CLASSIFIERS,
    RENAMED,
    TEXT,
    Case,
    Lora,
    Task,
    base_model,
    classifier_class,
    expert_names,
)
from tests.oracle.checks import LAWS, ORDER_FREE, SCALED
from tests.released import RELEASED

DTYPES = ("float32", "float32", "bfloat16", "float16")
#: Whose models hold their layers as their checkpoints do.
DENSE = (
    "Llama 3",
    "Qwen2.5",
    "Qwen3",
    "Gemma 3 text",
    "Phi-4",
    "GLM-4",
    "Granite",
    "OLMo 2",
    "OLMo 3",
    "SmolLM3",
    "gpt2",
    "gpt_neox",
    "phi3",
    "mistral",
    "qwen2",
    "roberta",
    "bert",
    "CLIP vision",
    "CLIP",
    "SigLIP",
    "T5",
    "resnet",
    "convnext",
)
#: Whose checkpoints hold layers by other names than the loaded model, or transposed.
OTHERWISE_STORED = (
    "gpt2",
    "CLIP",
    "SigLIP",
    "Qwen2.5-VL",
    "Gemma 3",
    "Mistral 3",
    "InternVL 3",
    "PaliGemma",
    "LLaVA",
)
#: Whose rotary embeddings transformers 4 describes by another field, so that they do not build.
OTHER_ROTARY_FIELD = ("Qwen3-VL", "Qwen3-VL-MoE")


def is_built(family):
    """Tell whether the installed transformers builds the model of a family."""
    if family in OTHER_ROTARY_FIELD:
        return transformers.__version__ >= "5"
    return family not in RELEASED or hasattr(transformers, RELEASED[family][0])


FAMILIES = tuple(filter(is_built, BUILDERS))
NUFILT_OPTIONS = {
    "null_rank": (6, 3, 0.25, 100),
    "lora_rank": (4, 0, 2),
    "task_rank": (3, 0, 1),
    "max_steps": (5, 0, 12),
    "null_space": (True, False, "zero"),
    "first_task": ("paper", "release"),
    "solver": ("adam", "closed_form"),
    "seed": (42, 7),
    "init_std": (0.02, 0.0),
}


@st.composite
def adapters(draw, family, *, can_be_dora):
    dora = can_be_dora and draw(st.booleans())
    biases = ("none",) if dora else ("none", "none", "all", "lora_only")
    on_tokens = family in TEXT and not dora
    modules = ("norms", "embeddings", "head") if family in TEXT else ("norms",)
    has_experts = bool(expert_names(base_model(family, None)))
    return Lora(
        r=draw(st.sampled_from((4, 1, 8, 40))),
        alpha=draw(st.sampled_from((8, 1, 16))),
        targets=tuple(sorted(draw(st.sets(st.integers(0, 11), min_size=1, max_size=4)))),
        rslora=draw(st.booleans()),
        dora=dora,
        first_block=draw(st.booleans()),
        pattern=draw(st.booleans()),
        bias=draw(st.sampled_from(biases)),
        saved=tuple(sorted(draw(st.sets(st.sampled_from(modules), max_size=2)))),
        embeddings=on_tokens and draw(st.booleans()),
        tokens=on_tokens and draw(st.booleans()),
        tying=on_tokens and draw(st.booleans()),
        experts=has_experts and draw(st.booleans()),
    )


@st.composite
def cases(draw):
    family = draw(st.sampled_from(FAMILIES))
    is_text = family in TEXT
    method = draw(st.sampled_from(("sum", "nufilt", *ORDER_FREE)))
    dtype = draw(st.sampled_from(DTYPES))
    law = draw(st.sampled_from(_laws(family, method, dtype)))
    way = draw(st.sampled_from(_ways(family, law, dtype)))
    is_full = way == "in memory" or law == "rotated"
    tasks = draw(_tasks(family, way, dtype, is_full, law == "rotated"))
    tied = None
    if is_text and family in RELEASED:
        tied = draw(st.sampled_from((None, True, False)))
    options = draw(_options(method, law, way, len(tasks), any(task.tokens for task in tasks)))
    return Case(
        family,
        tasks,
        dtype=dtype,
        shards=draw(st.booleans()),
        tied=tied,
        old_names=family in RENAMED and law != "rotated" and draw(st.booleans()),
        method=method,
        options=tuple(sorted(options.items())),
        way=way,
        law=law,
    )


def _laws(family, method, dtype):
    laws = ["", "zero task", "folders", "touched", "idle option", "threads", "files"]
    if method in ORDER_FREE:
        laws.append("order")
    if method in SCALED:
        laws.append("scale")
    # The leading directions of a flat spectrum are found by iteration from the same start in any
    # basis, to some per cent.
    if dtype == "float32" and family not in OTHERWISE_STORED and method != "best":
        laws.append("rotated")
    return laws


def _ways(family, law="", dtype="float32"):
    ways = ["at once", "one by one", "resumed", "command"]
    if law != "rotated":
        ways.append("an adapter")
    # transformers holds some weights of T5 in float32 where the others are in float16.
    if family in DENSE and (family != "T5" or dtype == "float32"):
        ways.append("in memory")
    return ways


@st.composite
def _tasks(draw, family, way, dtype, is_full, has_one_dtype):
    count = draw(st.integers(1, 4))
    is_text = family in TEXT
    has_tokens = is_text and way not in ("in memory", "an adapter") and draw(st.booleans())
    has_heads = way not in ("in memory", "an adapter") and not has_tokens
    has_heads = has_heads and is_classified(family) and draw(st.booleans())
    tasks = []
    for number in range(count):
        is_adapter = way == "an adapter" or (not is_full and draw(st.booleans()))
        seed = 10 * draw(st.integers(1, 9)) + number
        tokens = ()
        if has_tokens:
            tokens = tuple(sorted(draw(st.sets(st.integers(0, 2), max_size=3))))
        labels = draw(st.sampled_from((3, 5))) if has_heads else 0
        if is_adapter:
            lora = draw(adapters(family, can_be_dora=way != "an adapter"))
            tasks.append(Task(seed, lora, tokens=tokens, labels=labels))
            continue
        tasks.append(
            Task(
                seed,
                dtype="" if has_one_dtype else draw(st.sampled_from(("", "float32", "bfloat16"))),
                scale=draw(st.sampled_from((0.01, 0.002))),
                few=draw(st.booleans()),
                shards=draw(st.booleans()),
                old_names=family in RENAMED and draw(st.booleans()),
                tokens=tokens,
                labels=labels,
            )
        )
    return tuple(tasks)


def is_classified(family):
    """Tell whether a family has classes with a classifier, made from the models that are drawn."""
    if family in CLASSIFIERS:
        return True
    if family not in TEXT:
        return False
    model = base_model(family, None)
    # transformers 4 has no part of Gemma 3 by the name that it says.
    has_body = hasattr(model, model.base_model_prefix)
    return has_body and classifier_class(model) is not type(model)


@st.composite
def _options(draw, method, law, way, count, has_tokens):
    options = {}
    if method == "nufilt":
        for name in draw(st.sets(st.sampled_from(sorted(NUFILT_OPTIONS)), max_size=3)):
            options[name] = draw(st.sampled_from(NUFILT_OPTIONS[name]))
        if draw(st.booleans()):
            options["target_modules"] = "all-linear"
    else:
        if method in SCALED:
            options["scale"] = draw(st.sampled_from((1.0, 0.3, 1.5)))
        if draw(st.booleans()):
            options["ramp"] = draw(st.sampled_from((0.4, -0.2)))
        if draw(st.booleans()):
            options["target_modules"] = "auto"
    rules = ["pretrained", "mean"]
    if law != "order":
        rules.append("first")
    if draw(st.booleans()):
        options["other_params"] = draw(st.sampled_from(rules))
    if way != "in memory" and draw(st.booleans()):
        weights = st.sampled_from((1.0, 0.5, 0.25))
        options["weights"] = tuple(draw(st.lists(weights, min_size=count, max_size=count)))
    return options


#: All that is drawn sooner or later, as :func:`tests.oracle.cases.kinds_of` names it.
KINDS = [
    *(("family", family) for family in FAMILIES),
    *(("base", kind) for kind in (*sorted(set(DTYPES)), "shards", "one file", "tied", "untied")),
    ("base", "names of before"),
    *(("method", method) for method in ("nufilt", *ORDER_FREE)),
    *(("way", way) for way in (*_ways("bert"),)),
    *(("law", law) for law in ("none", *LAWS)),
    *(("tasks", str(count)) for count in range(1, 5)),
    *(
        ("task", kind)
        for kind in ("full", "LoRA", "few", "shards", "old_names", "tokens", "labels")
    ),
    *(("LoRA", kind) for kind in ("plain", "rslora", "dora", "first_block", "pattern", "tying")),
    *(("LoRA", kind) for kind in ("embeddings", "tokens", "bias=all", "bias=lora_only")),
    *(("LoRA", kind) for kind in ("experts", "saved norms", "saved embeddings", "saved head")),
    *(("LoRA", kind) for kind in ("own tokens", "own labels")),
    *(("option", name) for name in ("scale", "ramp", "weights", "null_rank", "lora_rank")),
    *(("option", f"other_params={rule}") for rule in ("pretrained", "first", "mean")),
    *(("option", f"target_modules={targets}") for targets in ("auto", "all-linear")),
    *(("option", f"solver={solver}") for solver in NUFILT_OPTIONS["solver"]),
]
