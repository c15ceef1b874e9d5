"""Cases that were wrong once, as the oracle printed them, by what was wrong."""

from tests.oracle.cases import Case, Lora, Task

REGRESSIONS = {
    "a full model and an adapter": Case("Llama 3", (Task(1), Task(2, Lora()))),
}
