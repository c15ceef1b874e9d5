"""Cases that were wrong once, as the oracle printed them, by what was wrong."""

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
}
