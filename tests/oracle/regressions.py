"""Cases in which the package or the oracle was wrong once, as that printed them, by what was
wrong.
"""

from tests.oracle.cases import Case, Lora, Task

REGRESSIONS = {
    "a full model and an adapter": Case("Llama 3", (Task(1), Task(2, Lora()))),
    "the state of a mean with rows that only pad the vocabulary": Case(
        "Llama 3",
        (Task(1), Task(3, tokens=(0,)), Task(4)),
        dtype="bfloat16",
        tied=True,
        way="one by one",
    ),
    "a layer with as many outputs as there are tokens": Case(
        "Phi-4", (Task(90), Task(11, tokens=(1,))), tied=False, method="sum"
    ),
    "rows that pad the vocabulary and that an adapter moved": Case(
        "Llama 3",
        (Task(11, Lora(embeddings=True)), Task(92, tokens=(0,))),
        tied=False,
        way="one by one",
    ),
    "queries, keys and values in one matrix": Case(
        "Gemma 3", (Task(71), Task(72, few=True)), method="nufilt"
    ),
    "new tokens that another order numbers otherwise": Case(
        "Llama 3",
        (Task(10), Task(11, tokens=(0,)), Task(12, tokens=(0,)), Task(13, tokens=(1,))),
        law="order",
    ),
    "a result that a strong adapter has moved far from its base": Case(
        "Llama 3",
        (Task(10), Task(11, Lora(alpha=16, targets=(2,), rslora=True, dora=True)), Task(12)),
        options=(("scale", 1.5),),
        way="one by one",
    ),
    "layers that are numbered and no blocks": Case(
        "Qwen2.5-VL", (Task(10),), options=(("ramp", 0.4), ("scale", 1.0))
    ),
    "a number that no adapter changes": Case(
        "CLIP", (Task(10, Lora()),), method="best", way="an adapter"
    ),
    "a head that is tied to embeddings that a classifier's adapter changes": Case(
        "SmolLM3", (Task(10, Lora(embeddings=True), labels=3),)
    ),
    "rows of a head that peft draws anew for each reader of an adapter": Case(
        "mistral",
        (Task(10), Task(11, Lora(saved=("embeddings",), embeddings=True), tokens=(0, 1, 2))),
    ),
}
