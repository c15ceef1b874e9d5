"""LoRA adapters as task models: what they change, by param, and which of them can't be merged.

Beside factors for its targets, an adapter may hold full tensors (``modules_to_save``), rows of
embeddings (``trainable_token_indices``), biases, and row lengths (DoRA). How they are read is in
``lora.py``, and factors of fused experts are in ``experts.py``.
"""

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

from fusion_bench_nufilt.utils.files import printable

from .architecture import Architecture
from .checkpoint import Checkpoint, config_at_hand
from .entries import Entry, Rows, Stored
from .experts import FactorsOfExpert, find_experts, find_saved_experts
from .heads import labels
from .lora import Dora, Factors, FactorsOfRows, LastFactors
from .model import COPY_HEAD, ModelWeights
from .names import module_of
from .peft_layers import (
    LENGTHS,
    ROWS,
    SAVED,
    WHOLE,
    WITH_PEFT,
    PeftLayer,
    Place,
    UnknownLayersError,
    ask_peft,
    auto_class,
    outer_module,
    place_of,
)
from .source import format_names

# peft also writes what the wrapper of a module in modules_to_save holds, if embeddings are saved.
_ORIGINAL = ".original_module."
# In a model, names have that of the adapter, without which peft saves it; in a file with another
# name than 'default', peft passes over them and merges nothing.
_NAMED = re.compile(r"\.lora_(?:[AB]\.(\w+)\.weight|embedding_[AB]\.(\w+))$")

_ONLY_LORA = "and only LoRA, rsLoRA and DoRA are merged. Where peft can merge it, "
_RESIZE = (
    "load its base, resize its embeddings as for the training (resize_token_embeddings), merge the "
    f"adapter into that {WITH_PEFT}"
)
_SAVE_AGAIN = "save it again from the model that was trained"


class LoraAdapter(ModelWeights):
    r"""A peft LoRA adapter: :math:`\theta_t = \theta_0 + s\,B A` for its targets, full tensors for
    `modules_to_save`.

    Other kinds of adapters are refused. What an adapter neither changes nor brings is as in the
    base.
    """

    kind = "LoRA adapter"

    def __init__(self, checkpoint: Checkpoint, architecture: Architecture) -> None:
        self.config: Mapping[str, Any] = checkpoint.adapter_config
        self.rows_of_embedding: list[str] = []  # further weights that get the embedding's rows
        self.trained_params: set[str] = set()  # of modules in modules_to_save
        self._last_factors = LastFactors()
        _check_config(checkpoint, architecture)
        _check_alone(checkpoint)
        self._prefix = _prefix_in(checkpoint, architecture)
        super().__init__(checkpoint, architecture)

    # Which tensors there are

    def params_of(self, *kinds: type[Entry]) -> list[str]:
        """Return the params of which the adapter has entries of some kinds, in whatever rows."""
        params = []
        for param, entry in self.entries.items():
            # Beside new tokens, any other kind is presented in rows.
            own = entry.own if isinstance(entry, Rows) else entry
            if isinstance(entry, kinds) or isinstance(own, kinds):
                params.append(param)
        return params

    def _find_tensors(self, architecture: Architecture) -> None:
        tensors = self.source.tensors
        if not tensors:
            raise ValueError(f"adapter '{self.source.name}' has no tensors: {_SAVE_AGAIN}")
        # Those of ZeRO-3 may stand where peft takes nothing from an adapter.
        self.source.check_not_empty(key for key in tensors if not _is_of_base(key))
        for key in filter(_is_of_base, tensors):
            self._note_beneath(architecture, key)
        keys: dict[str, dict[str, str]] = {}  # by part, of each module with factors
        unknown = []
        no_layers: set[str] = set()  # modules with factors or lengths of something else
        for key in tensors:
            if _is_of_base(key) or _is_copy(key, tensors):
                continue
            place = place_of(self._prefix + key)
            if place.part == ROWS:
                self._add_tokens(architecture, place.module, key)
            elif place.part == WHOLE and ".lora_" not in key:
                self._add_saved(architecture, place.name, key)
            elif self._is_of_layer(place, key, architecture):
                keys.setdefault(place.module, {})[place.part] = key
            else:
                unknown.append(key)
                if place.part != WHOLE:
                    no_layers.add(place.module)
        # Before the unknown are sent to peft, which passes over such names and merges nothing.
        self._refuse_named(unknown)
        # Of a convolution by DoRA, some tensors look like a layer's.
        for module in keys.keys() & no_layers:
            del keys[module]
        self._add_factors(keys, architecture)
        self._share_tied(architecture)
        if self.config.get("trainable_token_indices") and not self.params_of(Rows):
            raise ValueError(
                f"adapter '{self.source.name}' has no rows of the tokens that its "
                f"trainable_token_indices name: {_SAVE_AGAIN}"
            )
        if unknown:
            raise ValueError(
                f"adapter '{self.source.name}': {format_names(unknown)}: no LoRA of a linear "
                f"layer; {with_peft(self.checkpoint, architecture)}"
            )

    def _note_beneath(self, architecture: Architecture, key: str) -> None:
        """Note the embedding on which the adapter was trained, whose rows of new tokens may be
        others than the base's; refuse one that was resized, which would be without these rows, and
        one that was trained in full.
        """
        if not key.endswith(".base_layer.weight"):
            return
        name = place_of(self._prefix + key).name.replace(".token_adapter.", ".")
        is_saved = _is_in_module(name, self.config.get("modules_to_save") or ())
        if ".token_adapter." in key and is_saved:
            raise ValueError(
                f"adapter '{self.source.name}' has rows of tokens and all of '{name}', which peft "
                "makes and does not run: leave one of the two out, and train it again"
            )
        param = architecture.model_name(name)
        rows = self.source.tensors[key].shape[0]
        rows_of_base = architecture.rows(param)
        if rows == rows_of_base:
            self.beneath[param] = Stored.of(self.source, key)
        # A placeholder has no rows, and neither has what the base is not known to have.
        if 0 not in (rows, rows_of_base) and rows != rows_of_base:
            raise ValueError(
                f"adapter '{self.source.name}' was trained on '{name}' of {rows} rows, and the "
                f"base has {rows_of_base}: {_RESIZE}"
            )

    def _is_of_layer(self, place: Place, key: str, architecture: Architecture) -> bool:
        """Tell whether a tensor is a factor of a linear layer or of experts, or its lengths."""
        # Of fused experts, peft wraps a module once for each parameter, one in the other; so it
        # does with an nn.MultiheadAttention.
        outer = outer_module(place.module)
        if outer != place.module and not architecture.stacks_of(outer):
            return False
        if place.part == LENGTHS:
            # Those of some rows are the others', too, in a layer of all.
            return architecture.rows_of_divided(place.name) is None
        # A convolution's A has four sides.
        return place.part != WHOLE and len(self.source.tensors[key].shape) <= 2

    def _add_factors(
        self, keys: Mapping[str, Mapping[str, str]], architecture: Architecture
    ) -> None:
        """Note the factors A ``(rank, d_i)`` and B ``(d_o, rank)`` of the layers' updates, or of
        the experts in a stack, with what peft says of them.
        """
        for module, parts in keys.items():
            keys_of_factors = [key for part, key in parts.items() if part != LENGTHS]
            if any(len(self.source.tensors[key].shape) < 2 for key in keys_of_factors):
                self._check_shapes(module, parts, None)  # peft makes nothing of them
        try:
            layers = ask_peft(self.checkpoint, keys, architecture)
        except UnknownLayersError as error:
            raise ValueError(
                f"adapter '{self.source.name}' {error}, {_ONLY_LORA}"
                f"{with_peft(self.checkpoint, architecture)}"
            ) from error
        for module, parts in keys.items():
            self._check_shapes(module, parts, layers.get(module))
        experts = find_experts(self.checkpoint, architecture, keys, layers)
        for module, parts in keys.items():
            layer = layers[module]
            d_i = self.source.tensors[parts["A"]].shape[1]
            d_o = self.source.tensors[parts["B"]].shape[0]
            factors = Factors(
                self.source,
                "",
                (d_o, d_i),
                f"{module}.weight",
                parts["A"],
                parts["B"],
                layer.rank,
                layer.scaling,
                is_transposed=False,
                last=self._last_factors,
            )
            if module not in experts:
                self._add_layer(architecture, module, factors, parts.get(LENGTHS))
                continue
            for param, expert in experts[module].items():
                view = architecture.views[param]
                fields = vars(factors) | {
                    "name": param,
                    "shape": view.stored_shape,
                    "is_transposed": view.transposed,
                }
                self._add_new(param, module, FactorsOfExpert(**fields, expert=expert))

    def _check_shapes(self, module: str, parts: Mapping[str, str], layer: PeftLayer | None) -> None:
        """Refuse other tensors of a module than peft has of it."""
        self.source.check_floats(parts.values())
        stored = {part: self.source.tensors[key].shape for part, key in parts.items()}
        expected: object = "nothing"
        if layer is not None:
            if stored in (layer.shapes, layer.shapes_of_transpose):
                return
            expected = layer.shapes
            if stored.keys() != layer.shapes.keys():  # of which some sides are not known
                expected = f"{', '.join(layer.shapes)} of rank {layer.rank}"
        raise ValueError(
            f"adapter '{self.source.name}', '{module}': its file has {stored}, and peft makes "
            f"{expected} of its adapter_config.json for this base: they do not belong together; "
            f"{_SAVE_AGAIN}"
        )

    def _add_layer(
        self, architecture: Architecture, module: str, factors: Factors, lengths: str | None
    ) -> None:
        divided = architecture.rows_of_divided(factors.name)
        if divided is not None:
            param, rows = divided
            of_rows = self.entries.get(param)
            if not isinstance(of_rows, FactorsOfRows):
                of_rows = FactorsOfRows(self.source, "", architecture.shape(param))
                self._add_new(param, module, of_rows)
            self.entries[param] = of_rows.with_part(rows, factors)
            return
        param = architecture.model_name(factors.name)
        view = architecture.views.get(param)
        is_transposed = view is not None and view.transposed
        shape = factors.shape
        if factors.of_embedding or is_transposed:
            shape = shape[::-1]
        factors = replace(factors, name=param, shape=shape, is_transposed=is_transposed)
        entry: Entry = factors
        if lengths is not None:
            entry = Dora(self.source, "", shape, factors, lengths)
        self._add_new(param, module, entry)

    def _add_saved(self, architecture: Architecture, name: str, key: str) -> None:
        """Note a full tensor, which may be a stack of experts that are layers by themselves."""
        experts = find_saved_experts(self.checkpoint, architecture, key, name)
        for param, rows in experts.items():
            self._add_new(param, name, rows)
        if not experts:
            param = architecture.model_name(name)
            self._add_new(param, name, Stored.of(self.source, key))
            if _is_in_module(name, self.config.get("modules_to_save") or ()):
                self.trained_params.add(param)

    def _add_tokens(self, architecture: Architecture, module: str, key: str) -> None:
        """Note the rows of an embedding that the adapter trained, which replace the base's."""
        name = self.source.name
        param = architecture.model_name(f"{module}.weight")
        numbers = self.config.get("trainable_token_indices")
        if isinstance(numbers, dict):
            of_module = [numbers[end] for end in numbers if _is_found(module, [end])]
            numbers = of_module[0] if of_module else None
        count = self.source.tensors[key].shape[0]
        rows = architecture.rows(param)
        claim = f"{count} rows for the tokens {numbers} of '{param}' with {rows} rows"
        if not numbers or len(numbers) != count:
            raise ValueError(f"adapter '{name}' has {claim}: {_SAVE_AGAIN}")
        # Of another base, or of one whose layers are told by names, which show no embedding.
        if rows == 0:
            raise ValueError(
                f"adapter '{name}' has rows for the tokens {numbers} of '{param}', which the base "
                f"is not known to have: {with_peft(self.checkpoint, architecture)}"
            )
        if max(numbers) >= rows:
            raise ValueError(f"adapter '{name}' has {claim}: {_RESIZE}")
        places = {number: place for place, number in enumerate(numbers)}
        stored = Stored.of(self.source, key)
        in_order = [places.get(row, -1) for row in range(rows)]
        self._add_new(param, module, stored.in_rows(in_order, (rows, *stored.shape[1:])))

    def _add_new(self, param: str, name: str, entry: Entry) -> None:
        """Note what the adapter has of a tensor, of which it must have nothing so far."""
        if param in self.entries:
            raise ValueError(
                f"adapter '{self.source.name}' changes '{param}' twice, as '{name}' too: "
                f"{_SAVE_AGAIN}"
            )
        self.entries[param] = entry

    def _share_tied(self, architecture: Architecture) -> None:
        """Give all names of a weight what peft applies to all of them: a tensor that it saved by
        itself, such as a resized embedding, and rows that were trained in the embedding.
        """
        for names in architecture.shared:
            stored = [name for name in names if self.info(name) is not None]
            with_rows = [name for name in stored if isinstance(self.entries[name], Rows)]
            for name in stored:
                # By default, peft trains a copy of a module, and leaves what it is tied to as it
                # was; so it does with rows of the embedding if it trains others of the head.
                if name in self.trained_params or len(with_rows) > 1:
                    continue
                if name in with_rows and name != architecture.embedding:
                    continue
                self._share(name, names)
        # It has these rows in all that the class ties to the embedding, two weights or not.
        embedding = architecture.embedding
        for other in architecture.tied_by_class(embedding):
            if isinstance(self.entries.get(embedding), Rows) and other not in self.entries:
                self._share(embedding, [other])
                self.rows_of_embedding.append(other)

    def _refuse_named(self, unknown: Sequence[str]) -> None:
        """Refuse tensors whose names have the adapter's own, and say how it is taken out."""
        for key in unknown:
            named = _NAMED.search(key)
            if named is None:
                continue
            adapter = named[1] or named[2]
            of_dora = rf"(?<=magnitude_vector)\.{adapter}\.weight$"
            remedy = self.checkpoint.stripping(rf"{of_dora}|\.{adapter}(?=\.|$)")
            raise ValueError(
                f"adapter '{self.source.name}' was saved from a model that calls it "
                f"'{adapter}': the name of '{key}' has '{adapter}.', without which peft saves "
                f"it. {remedy}"
            )

    @property
    def trained_modules(self) -> Collection[str]:
        return {module_of(param) for param in self.trained_params}

    def name_of(self, key: str) -> str:
        return place_of(key).name

    def head_config(self, base: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return the configuration in the adapter's folder, or else the base's, with the class that
        peft names and the labels that the adapter trained.
        """
        config = dict(self.source.config or base)
        model_class = (self.config.get("auto_mapping") or {}).get("base_model_class")
        model_class = model_class or getattr(auto_class(self.config), "__name__", None)
        # Beside an adapter, programs write the configuration of its base, which need have no head.
        if model_class is not None:
            config["architectures"] = [model_class]
        count = self._count_labels()
        if len(labels(config) or ()) != count:
            config["id2label"] = {str(number): f"LABEL_{number}" for number in range(count)}
            config["label2id"] = {f"LABEL_{number}": number for number in range(count)}
        return config

    @property
    def trained_config(self) -> Mapping[str, Any]:
        if self.source.config:
            return super().trained_config
        name = self.checkpoint.adapter_config.get("base_model_name_or_path")
        return config_at_hand(name or "", self.checkpoint.adapter_config.get("revision"))

    def _count_labels(self) -> int:
        """Return the number of rows of the head's output layer, which no other layer follows."""
        shapes = [entry.shape for entry in self.head.values()]
        matrices = [shape for shape in shapes if len(shape) >= 2]
        # By name, the others may come later: a DistilBERT has classifier and pre_classifier.
        inputs = {shape[1] for shape in matrices}
        outputs = [shape for shape in matrices if shape[0] not in inputs]
        candidates = outputs or matrices or shapes
        return candidates[-1][0]

    # What is checked before a merge

    def check_uses(
        self, base: ModelWeights, layers: Collection[str], rule: str, architecture: Architecture
    ) -> list[str]:
        warnings = []
        if self.rows_of_embedding:
            others = format_names(self.rows_of_embedding)
            warnings.append(
                f"adapter '{self.source.name}' trained rows of the embedding, which peft also puts "
                f"into {others}, as do we: the model's class ties the two, and its files do not"
            )
        trained_on = self.checkpoint.adapter_config.get("base_model_name_or_path")
        # A local folder may be called anything, and its config.json may still have the hub's name.
        source = base.source
        given = [source.name, source.label, source.config.get("_name_or_path")]
        given_names = {base_name_key(name) for name in given if isinstance(name, str)}
        if trained_on and base_name_key(trained_on) not in given_names:
            warnings.append(
                f"adapter '{self.source.name}' was trained on '{printable(trained_on)}', and the "
                f"base given is '{source.name}': make sure that these are the same model"
            )
        outside = [param for param in self.changed_params if param not in layers]
        dora = [param for param in self.params_of(Dora) if param not in layers]
        if dora and rule != "pretrained":
            could_be_layers = "name them in target_modules, or "
            if any(param not in architecture.views for param in dora):
                could_be_layers = ""
            raise ValueError(
                f"adapter '{self.source.name}' changes {format_names(dora)} by DoRA outside the "
                f"merged layers: {could_be_layers}{with_peft(self.checkpoint, architecture)}"
            )
        if rule != "pretrained":
            return warnings
        ignored = [name for name in outside if name in base.entries]
        ignored += [name for name in self.left_out if name not in ignored]
        with_rows = [name for name in ignored if name in self.gives_rows_of]
        ignored = [name for name in ignored if name not in with_rows]
        for names, extent in ((ignored, ""), (with_rows, " but for the rows of its new tokens")):
            if names:
                listing = format_names(names)
                warnings.append(
                    f"adapter '{self.source.name}' also changes {listing}: ignored{extent}"
                )
        return warnings


# Starts of training that leave the base's weights as they are.
_PLAIN_INITS = ("true", "false", "none", "gaussian", "eva", "orthogonal", "mica")


def _is_of_base(key: str) -> bool:
    """Tell whether a tensor is the base's own, which peft saves with an adapted embedding or head,
    or with the wrapper of a module.
    """
    is_own = ".base_layer." in key and ".lora_" not in key and not key.endswith(".bias")
    return is_own or _ORIGINAL in key


def holds_in_full(adapter: Checkpoint) -> bool:
    """Tell whether an adapter holds tensors, or some rows of them, in full."""
    parts = {place_of(key).part for key in adapter.tensors if not _is_of_base(key)}
    return not parts.isdisjoint((WHOLE, ROWS))


def _is_copy(key: str, tensors: Collection[str]) -> bool:
    """Tell whether a tensor of a module that is held in full is there once more, as biases are if
    all are saved: under the name of the wrapper, and that of the adapter if a module inside has it.
    """
    path, wrapper, name = key.partition(SAVED)
    names = (name, name.partition(".")[2])
    return bool(wrapper) and any(f"{path}.{each}" in tensors for each in names)


def _is_found(module: str, ends: Sequence[str]) -> bool:
    """Tell whether peft finds a module to train in full, or some rows of it, by one of some ends of
    its path, which need not begin at a dot: ``head`` is the end of ``lm_head``.
    """
    return module.endswith(tuple(ends))


def _is_in_module(name: str, ends: Sequence[str]) -> bool:
    """Tell whether a tensor belongs to a module that peft finds by one of some ends."""
    path = module_of(name)
    while path and not _is_found(path, ends):
        path = module_of(path)
    return bool(path)


def _check_config(checkpoint: Checkpoint, architecture: Architecture) -> None:
    """Refuse an adapter that is another change of the base than B A, or none."""
    config: Any = checkpoint.adapter_config
    adapter = f"adapter '{checkpoint.name}'"
    if config.get("peft_type") != "LORA":
        raise ValueError(
            f"{adapter} is of type {config.get('peft_type')}, {_ONLY_LORA}"
            f"{with_peft(checkpoint, architecture)}"
        )
    initialisation = str(config.get("init_lora_weights", True))
    # In lower case, as peft compares them.
    if initialisation.lower() not in _PLAIN_INITS:
        raise ValueError(
            f"{adapter} was initialised with {initialisation}, which changes the base as well: "
            "save it with peft's path_initial_model_for_weight_conversion"
        )


def _prefix_in(checkpoint: Checkpoint, architecture: Architecture) -> str:
    """Return what comes before an adapter's names in those of the base, of which the model that it
    is for may be a part.
    """
    auto_mapping = checkpoint.adapter_config.get("auto_mapping") or {}
    prefix = architecture.prefix_of(str(auto_mapping.get("base_model_class")))
    for key in checkpoint.tensors:
        place = place_of(key)
        if place.part == "A" and architecture.has(place.name):
            return ""
    return prefix


def _check_alone(checkpoint: Checkpoint) -> None:
    """Refuse an adapter beside which there are other weights, such as a projector that was trained
    with it: they would be left out.
    """
    files = checkpoint.unread_weights
    if files:
        raise ValueError(
            f"adapter '{checkpoint.name}' has {format_names(files)} beside it, which is no part of "
            "the adapter: merge both into the base with the program that trained them, and give "
            "that folder; weights that do not belong to it must lie elsewhere"
        )


def with_peft(adapter: Checkpoint, architecture: Architecture) -> str:
    """Return the end of a message about an adapter that only peft can merge.

    Into a weight that several modules share, peft adds the updates of all of them.
    """
    for names in architecture.shared:
        for name in names:
            module = module_of(name)
            # With dots at both ends, since 'head' must not be found in 'lm_head'.
            if any(f".{module}." in f".{key}" for key in adapter.tensors):
                return f"{COPY_HEAD}, merge it into that {WITH_PEFT}"
    return f"merge it into its base {WITH_PEFT}"


def adapter_config(
    configs: Sequence[Mapping[str, Any]],
    base_name: str | None,
    ranks: Mapping[str, int],
    class_of_model: Mapping[str, str] | None,
) -> dict[str, Any]:
    """Return the adapter_config.json of an adapter of scaling 1, given those that it was merged
    from, the rank of each module, and what peft notes of the class that it is for.

    The highest rank is the one that every server looks at; it also is lora_alpha, so that one which
    does not know patterns scales by 1, too.
    """
    highest = max(ranks.values())
    lower = {module: rank for module, rank in ranks.items() if rank < highest}
    config: dict[str, Any] = {
        "peft_type": "LORA",
        "task_type": None,
        "auto_mapping": class_of_model,
        "base_model_name_or_path": base_name,
        "inference_mode": True,
        "r": highest,
        "lora_alpha": highest,
        "rank_pattern": lower,
        "alpha_pattern": lower,
        "target_modules": list(ranks),
        "fan_in_fan_out": any(config.get("fan_in_fan_out") for config in configs),
        "lora_dropout": 0.0,
        "bias": "none",
        "use_rslora": False,
        "use_dora": False,
        "modules_to_save": None,
    }
    fields = ["task_type", "revision"]
    if class_of_model is None:
        fields.append("auto_mapping")
    for field in fields:
        values = [each.get(field) for each in configs]
        if all(value == values[0] for value in values):
            config[field] = values[0]
    return config


# How keys of mlx-lm end, and those of kohya and diffusers.
_OF_OTHERS = re.compile(r"\.lora_[ab]|\.lora[._](up|down)\.weight")


def refuse_adapter_of_others(checkpoint: Checkpoint) -> None:
    """Refuse what is no whole model, and no adapter that peft would read."""
    for key in checkpoint.tensors:
        if _OF_OTHERS.search(key):
            raise ValueError(
                f"'{checkpoint.name}' is an adapter that is not peft's ('{key}'): merge it into "
                "its base with the program that trained it, and give that folder"
            )


def base_name_key(model: str) -> str:
    """Return what the names of one model have in common: its own, without its owner or folders, its
    revision and the mark of a copy of it that bitsandbytes quantised.
    """
    # In the hub's cache, a model lies in models--OWNER--NAME/snapshots/COMMIT.
    path = re.sub(r"models--([^/]+)/snapshots/[^/]+$", r"\1", model.replace("\\", "/").rstrip("/"))
    name = path.rpartition("/")[2].rpartition("--")[2].partition("@")[0].lower()
    return re.sub(r"(-unsloth)?-bnb-[48]bit$", "", name)
