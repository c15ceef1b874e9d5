"""What the JSON files beside models and results hold, as far as it is read back; there is more in
them, for people.
"""

from typing import Annotated, Any

from pydantic import Field, NonNegativeInt
from typing_extensions import TypedDict

#: A number of models: nobody merges a million, so that a larger number means damage.
Count = Annotated[int, Field(ge=1, le=10**6)]
#: A task's score: a fraction, or a metric of another scale, none of which reaches these bounds.
Score = Annotated[float, Field(ge=-(10**4), le=10**4)]
Seconds = Annotated[float, Field(ge=0, le=10**9)]


class Fingerprint(TypedDict):
    size: int  # in bytes
    sha256: str


class InputFile(TypedDict, total=False):
    """What tells a file of a model from others: of weights all but the last, of others that."""

    size: int  # in bytes
    time: int  # of the last change, in nanoseconds
    header: str  # digest of its header
    sha256: str


class Input(TypedDict, total=False):
    name: str
    source: Any  # of a model pool's entry: a folder, a hub name or a configuration
    sha256: str  # of a model pool: digest of its weights
    revision: str  # of a folder merge: its commit on the hub, or else its files
    files: dict[str, InputFile]


class Head(TypedDict):
    file: str  # with its tensors, relative to the folder of the merged model
    modules: list[str]  # their modules' names, as the base would have them
    config: dict[str, Any]  # of the task's model, with its id2label, label2id and problem_type


class Share(TypedDict):
    parameters: int
    share: float  # of the model's elements, 0 to 1


class Coverage(TypedDict):
    merged: Share
    averaged: Share
    kept: Share
    left_out: dict[str, int]


class LayerStep(TypedDict):
    """What a step did to a layer; there is more, which depends on the method."""

    step: Count
    shape: list[int]
    task_norm: float


class VocabularyEntry(TypedDict, total=False):
    #: The sum of the weights of the models in the mean of a new token's rows, where it is not 1.
    token_weights: dict[str, Annotated[float, Field(ge=0, le=10**9)]]


class Manifest(TypedDict, total=False):
    """The file ``nufilt.json`` of a merged model, whether a step of a run or a merge of folders
    made it.
    """

    method: str
    step: Count  # the number of models merged so far
    tasks: list[str]  # their names, in merging order
    order: list[str]  # all models of the stream, of which `tasks` are the first ones
    inputs: dict[str, Input]
    settings: dict[str, Any]
    #: Models in the mean of a tensor, where that is not `step`.
    mean_counts: dict[str, NonNegativeInt]
    #: All files of the folder but the manifest, by their relative paths.
    files: dict[str, Fingerprint]
    vocabulary: VocabularyEntry
    heads: dict[str, Head]  # by the names of their tasks
    merge_seconds: list[float]
    coverage: dict[str, Any]
    strength: Any  # of the whole update and what it follows from, if the method found it
