"""The vocabulary of a result: which token has which row of the embeddings, where models brought new
tokens.

Rows are matched by token. The rows of the base's tokens are merged or averaged like any weight; the
row of a new token is the mean over the models that have it.
"""

import hashlib
import json
import math
import tempfile
from bisect import bisect_right
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fusion_bench_nufilt.utils.files import parse_json
from fusion_bench_nufilt.utils.manifest import state_key
from fusion_bench_nufilt.utils.tensors import CHUNK_BYTES, compute_dtype, is_finite

from .entries import Entry
from .model import ModelWeights
from .source import check_belongs, format_names

_NOTHING = torch.empty(0, dtype=torch.float32, device="cpu")

Models = Mapping[str, ModelWeights]
"""Models by their role in the merge: base, merged, task 0, ..."""


class Holder(NamedTuple):
    """A model that has a new token."""

    role: str  # in the merge
    row: int  # the token's row in it
    weight: float  # of this row in the mean; of the model merged so far, that of all its tasks


@dataclass
class Vocabulary:
    """The rows of a result's embeddings; without ``params``, they are those of the base."""

    models: Models = field(default_factory=dict)
    params: list[str] = field(default_factory=list)  # tensors with a row for every token
    tokenizer: str = "base"  # base, union, or the name of the model whose tokenizer the result has
    rows: int = 0
    tokens: dict[int, str] = field(default_factory=dict)  # new ones, by their rows in the result
    holders: dict[int, list[Holder]] = field(default_factory=dict)  # the models that have them
    unnamed: set[int] = field(default_factory=set)  # those that no tokenizer names
    #: What each model has of the params, in its own rows, by role; the state, too.
    own: dict[str, dict[str, Entry]] = field(default_factory=dict)
    files: dict[str, bytes] = field(default_factory=dict)  # all small files of the result
    warnings: list[str] = field(default_factory=list)
    identity: str = ""  # a digest of how rows are matched
    _means: dict[str, Tensor] = field(default_factory=dict)  # of the base's rows, by param

    def as_dict(self) -> dict[str, Any]:
        """Return the manifest's entry."""
        if not self.params:
            return {}
        labels: dict[str, str] = {}
        token_weights: dict[str, float] = {}
        for row, token in self.tokens.items():
            holders = self.holders[row]
            models = [self.models[holder.role].source for holder in holders]
            labels[token] = ", ".join(model.label for model in models)
            weight = sum(holder.weight for holder in holders)
            if weight != 1:
                token_weights[token] = weight
        return {
            "tokenizer": self.tokenizer,
            "rows": self.rows,
            "new_tokens": labels,
            "token_weights": token_weights,
            "matching": self.identity,
        }

    def __str__(self) -> str:
        text = f"{self.tokenizer}, {self.rows} rows, {len(self.tokens)} new tokens"
        if self.tokens:
            text += f": {format_names(self.tokens.values())}"
        return text

    def check(self) -> None:
        """Refuse rows that no tokenizer names and that differ between models: they may be those of
        different tokens. Models still on the hub are not compared.
        """
        for row in self.unnamed:
            holders = self.holders[row]
            local = [holder for holder in holders if not self.models[holder.role].source.remote]
            if len(local) < 2:
                continue
            for param in self.params:
                holders_of_param = [each for each in self._holders(param, row) if each in local]
                values = [self._row(param, each).double() for each in holders_of_param]
                if not all(torch.equal(values[0], value) for value in values[1:]):
                    labels = [self.models[holder.role].source.label for holder in holders]
                    raise ValueError(
                        f"token '{self.tokens[row]}' is new in {format_names(labels)} with "
                        f"different rows of '{param}': --tokenizer {labels[0]} takes that model's "
                        "tokens alone, --tokenizer base none"
                    )

    def _row(self, param: str, holder: Holder) -> Tensor:
        """Read a row of a tensor, that of the model merged so far in float32 if that is kept."""
        of_base = self.own["base"][param]
        width = math.prod(of_base.shape[1:])
        start = holder.row * width
        theta_0 = _NOTHING
        if holder.row < of_base.shape[0]:
            theta_0 = of_base.elements(start, start + width, _NOTHING)
        own = self.own[holder.role].get(param)
        if own is None:
            return theta_0
        row = own.elements(start, start + width, theta_0)
        kept = self.own.get("state", {}).get(state_key(param))
        if holder.role != "merged" or kept is None:
            return row
        mean = kept.elements(start, start + width, theta_0)
        check_belongs(mean, row, kept.key, kept.source)
        return mean

    def mean_row(self, param: str, row: int) -> Tensor:
        """Return the row of a new token, in float32 at least if several models have it."""
        mean = None
        weight = 0.0
        holders = self._holders(param, row)
        if not holders:
            return self._mean_of_base(param)
        for holder in holders:
            value = self._row(param, holder)
            if not is_finite(value):
                name = self.models[holder.role].source.name
                raise ValueError(
                    f"model '{name}', tensor '{param}' has NaN or infinite values for token "
                    f"'{self.tokens[row]}'"
                )
            weight += holder.weight
            # The row of a single model keeps its bits, and the first one stays where all weights
            # are zero.
            if mean is None:
                mean = value
            elif weight > 0:
                wide = compute_dtype(mean)
                mean = torch.lerp(mean.to(wide), value.to(wide), holder.weight / weight)
        assert mean is not None
        return mean

    def _holders(self, param: str, row: int) -> list[Holder]:
        """Return the models with a new token that have a row for it, if only the base's."""
        rows_of_base = self.own["base"][param].shape[0]
        holders = []
        for holder in self.holders[row]:
            own = self.own[holder.role].get(param)
            if holder.row < rows_of_base or (own is not None and own.key):
                holders.append(holder)
        return holders

    def _mean_of_base(self, param: str) -> Tensor:
        """Return the mean of the base's rows, around which transformers draws new ones."""
        if param not in self._means:
            of_base = self.own["base"][param]
            shape = of_base.shape
            width = math.prod(shape[1:])
            length = max(1, CHUNK_BYTES // (8 * width)) * width
            total = torch.zeros(width, dtype=torch.float64, device="cpu")
            for start in range(0, shape[0] * width, length):
                stop = min(start + length, shape[0] * width)
                rows = of_base.elements(start, stop, _NOTHING)
                total += rows.double().view(-1, width).sum(0)
            self._means[param] = (total / shape[0]).float()
        return self._means[param]

    def without_rows(self) -> dict[str, list[str]]:
        """Return by param the new tokens for which no model has a row."""
        tokens: dict[str, list[str]] = {}
        for param in self.params:
            without = [row for row in sorted(self.tokens) if not self._holders(param, row)]
            if without:
                tokens[param] = [self.tokens[row] for row in without]
        return tokens

    def resized(self, param: str, shape: Sequence[int]) -> tuple[int, ...]:
        """Return the shape of a tensor in the result, given the base's."""
        if param not in self.params:
            return tuple(shape)
        return (self.rows, *shape[1:])

    def elements(
        self,
        param: str,
        start: int,
        stop: int,
        dtype: torch.dtype,
        read: Callable[[int, int], Tensor],
    ) -> Tensor:
        """Return the elements ``start`` to ``stop`` of a flattened tensor of ``params`` in the
        result's rows.

        ``read`` gives those in the base's rows, which are brought to ``dtype``. Rows of new tokens
        keep their digits; a ValueError names one that ``dtype`` can't hold.
        """
        rows_of_base, *sides = self.own["base"][param].shape
        width = math.prod(sides)
        ends = sorted({*self.holders, rows_of_base, self.rows})  # of what is read at once
        pieces = []
        while start < stop:
            row = start // width
            if row in self.holders:
                end = min((row + 1) * width, stop)
                value = self._row_in(param, row, dtype)
                pieces.append(value[start - row * width : end - row * width])
            else:
                end = min(ends[bisect_right(ends, row)] * width, stop)
                if row < rows_of_base:
                    pieces.append(read(start, end).to(dtype))
                else:
                    pieces.append(torch.zeros(end - start, dtype=dtype, device="cpu"))
            start = end
        return torch.cat(pieces)

    def _row_in(self, param: str, row: int, dtype: torch.dtype) -> Tensor:
        """Return the row of a new token; a ValueError names one that a dtype can't hold."""
        value = self.mean_row(param, row)
        if not is_finite(value.to(dtype)):
            raise ValueError(
                f"tensor '{param}' has values for token '{self.tokens[row]}' that {dtype} can't "
                "hold"
            )
        return value

    def grown_layer(self, param: str, weight: Tensor) -> Tensor:
        """Return a layer, which is merged in the base's rows, with those of new tokens."""
        if param not in self.params:
            return weight
        shape = self.resized(param, weight.shape)
        flat = weight.flatten().cpu()
        grown = self.elements(
            param, 0, math.prod(shape), weight.dtype, lambda start, stop: flat[start:stop]
        )
        return grown.to(weight.dtype).reshape(shape)


TOKENIZER_FILES = (
    r"(.*token.*|special_tokens_map|vocab|chat_template)\.json"
    r"|(vocab|merges)\.txt|.*\.(model|tiktoken|jinja)"
)


class _Tokens:
    """The tokens of a model and their rows. Rows whose tokens are unknown are named by their
    numbers.
    """

    def __init__(
        self, model: ModelWeights, params: Sequence[str], base: "_Tokens | None" = None
    ) -> None:
        self.model = model
        self.label = model.source.label
        self._base = base
        # What a model lacks, as a classifier does the head of a language model, tells no rows.
        self.own = _own_entries(model, params)
        rows = [entry.shape[0] for entry in self.own.values() if entry.key]
        if base is not None and not rows:
            rows.append(base.rows)
        self.rows: int = min(rows)
        self.files = model.checkpoint.small_files(TOKENIZER_FILES)
        self.words = _words(self.files)
        self.template = _template(self.files)

    @property
    def tokenizer(self) -> Any:
        """The tokenizer in the folder, or the base's if it has the same files; None if it or the
        base's is unknown.
        """
        return self._read[0]

    @property
    def why_unknown(self) -> str:
        return self._read[1]

    @cached_property
    def _read(self) -> tuple[Any, str]:
        """The tokenizer, and why there is none."""
        import transformers

        base = self._base
        # Equal files are opened once, and beside a base without tokenizer, none can be matched.
        if base and (base.tokenizer is None or self.words == base.words):
            return base._read
        if not self.words:
            return None, f"'{self.label}' has no tokenizer"
        folder = self.model.checkpoint.folder
        try:
            tokenizer: Any = transformers.AutoTokenizer.from_pretrained(
                folder, local_files_only=True, trust_remote_code=False
            )
        # Damaged files, a package that is not installed, code of the model's own.
        except Exception as error:
            reason = (str(error).strip() or repr(error)).splitlines()[0]
            return (
                None,
                f"the tokenizer of '{self.label}' ({format_names(self.files)}) can't be read: "
                f"{reason}; mend it, or install what it needs; if its tokens are those of the "
                "other models, copy their files",
            )
        return tokenizer, ""

    @cached_property
    def all(self) -> dict[str, int]:
        """The numbers of all tokens, some of which may have no row."""
        if self.tokenizer:
            return dict(self.tokenizer.get_vocab())
        numbers = {}
        first_unknown = 0
        if self._base:
            numbers = dict(self._base.ids)
            first_unknown = self._base.rows
        for row in range(first_unknown, self.rows):
            numbers[f"row {row}"] = row
        return numbers

    @cached_property
    def ids(self) -> dict[str, int]:
        return {token: row for token, row in self.all.items() if row < self.rows}

    def is_like(self, base: "_Tokens") -> bool:
        """Tell whether it has the base's tokens, which it also has without a tokenizer."""
        return self.rows == base.rows and self.words in (base.words, {})

    def fits(self, base: "_Tokens", params: Sequence[str]) -> bool:
        """Tell whether its embeddings differ from the base's in rows only, which can be matched if
        it has fewer.
        """
        for param in params:
            entry = self.model.entries.get(param)
            if entry is None or not entry.key:
                continue
            if entry.shape[1:] != base.own[param].shape[1:]:
                return False
        return self.rows >= base.rows or self.tokenizer is not None

    def rows_of(self, base: "_Tokens") -> list[int]:
        """Return, for each row of the base, the row of its token here, or -1 if there is none."""
        rows = [-1] * base.rows
        for token, row in base.ids.items():
            rows[row] = self.ids.get(token, -1)
        return rows


def join_vocabularies(
    models: Models,
    params: Sequence[str],
    choice: str,
    files: Mapping[str, bytes],
    token_weights: Mapping[str, float],
    *,
    layers: Collection[str],
    first_alone: bool,
    kept: ModelWeights | None,
) -> Vocabulary:
    """Match the rows of all models by token, and choose the result's. All models then present the
    result's rows, those of new tokens as the mean of the models that have them, so that the mean of
    all models, of the first or of none is right by itself.

    A model whose rows can't be matched stays as it is. A layer is merged in the base's rows, and
    gets those of new tokens at its end (:meth:`Vocabulary.grown_layer`).

    Args:
        models: the base, the model merged so far, and the tasks, including adapters.
        params: the tensors that have a row for every token.
        choice: whose tokens the result has: base, union, or the name of a model.
        files: the small files of the base.
        token_weights: those of new tokens of the model merged so far in the means of their rows,
            where they are not 1.
        layers: the params that are merged as layers.
        first_alone: whether the row of a new token is that of the first model that has it.
        kept: the state beside the model merged so far.

    Raises:
        ValueError: ``choice`` names no model, or the tokens do not go together; the message names
            one.
    """
    if not params and choice not in ("base", "union"):
        raise ValueError(
            f"tokenizer '{choice}': the base has no embedding that can be told to be of tokens"
        )
    owner = _owner(models, choice)
    name = choice
    if choice == models[owner].source.name:
        name = models[owner].source.label
    if not params:
        return Vocabulary(tokenizer=name, files=dict(files))
    base = _Tokens(models["base"], params)
    tokens_of = {"base": base}  # of the models whose rows can be matched, by their role
    for role, model in models.items():
        if role != "base":
            tokens = _Tokens(model, params, base)
            if tokens.fits(base, params):
                tokens_of[role] = tokens
    if owner not in tokens_of:
        return Vocabulary(tokenizer=name, files=dict(files))
    roles = [owner]
    if choice == "union":
        roles += [role for role in tokens_of if role != owner]
    in_order = [tokens_of[role] for role in roles]
    keeps_files = choice in ("base", "union") or tokens_of[owner].files in (base.files, {})
    if keeps_files and all(tokens.is_like(base) for tokens in tokens_of.values()):
        return Vocabulary(tokenizer=name, files=_with_template(files, in_order))
    result = Vocabulary(models, list(params), name, files=dict(files))
    result.own = {role: tokens.own for role, tokens in tokens_of.items()}
    if kept is not None:
        result.own["state"] = _own_entries(kept, map(state_key, params))

    def weight_of(role: str, token: str, holders: Sequence[Holder]) -> float:
        if role == "merged":
            return token_weights.get(token, 1.0)
        if first_alone:
            return 0.0 if holders else 1.0
        return max(models[role].coefficient, 0.0)

    extended = _number_tokens(result, tokens_of, roles, weight_of)
    result.rows = max([base.rows, *(row + 1 for row in result.tokens)])
    _check_columns(result, base)
    _set_files(result, base, tokens_of[owner], extended)
    result.files = _with_template(result.files, in_order)
    matched: dict[str, list[int]] = {}
    for tokens in tokens_of.values():
        result.warnings += _warnings(result, base, tokens)
        entries = [tokens.model.entries[param] for param in params if tokens.model.info(param)]
        tokens.model.source.check_floats(entry.key for entry in entries)
        rows = tokens.rows_of(base)
        if tokens.rows != base.rows or rows != list(range(base.rows)):
            matched[tokens.label] = rows
        if tokens is base:
            continue
        state = kept if tokens.model is models.get("merged") else None
        _match_rows(result, base, tokens, layers, state)
    for param, without in result.without_rows().items():
        result.warnings.append(
            f"no model has rows of '{param}' for {format_names(without)}: these get the mean of "
            "the base's"
        )
    for holders in result.holders.values():
        for holder in holders:
            model = models[holder.role]
            model.gives_rows_of.update(model.entries.keys() & set(params))
    result.check()
    matching = repr([result.rows, result.holders, matched])
    result.identity = hashlib.sha256(matching.encode()).hexdigest()
    return result


def _own_entries(model: ModelWeights, params: Iterable[str]) -> dict[str, Entry]:
    """Return what a model has of some tensors, in its head or outside."""
    own = {**model.head, **model.entries}
    return {param: own[param] for param in params if param in own}


def _match_rows(
    result: Vocabulary,
    base: _Tokens,
    tokens: _Tokens,
    layers: Collection[str],
    state: ModelWeights | None,
) -> None:
    """Have a model, and the state beside it, present the result's rows, of layers the base's, and
    be compared by these.
    """
    model = tokens.model
    rows = tokens.rows_of(base)
    for param in result.params:
        entry = model.entries.get(param)
        if entry is None:
            continue
        wanted = rows
        shape = base.own[param].shape
        # An adapter's factors have a row for each of the base's, whatever its tokens are.
        if not entry.key:
            if param in layers or entry.shape != shape:
                continue
            wanted = list(range(base.rows))
        if param not in layers:
            wanted = [-1 if row in result.holders else stored for row, stored in enumerate(wanted)]
            wanted += [-1] * (result.rows - base.rows)
        if wanted == list(range(entry.shape[0])):
            continue
        model.entries[param] = entry.in_rows(wanted, shape)
        key = state_key(param)
        if state is not None and key in state.entries:
            state.entries[key] = state.entries[key].in_rows(wanted, shape)


def _owner(models: Models, choice: str) -> str:
    """Return the role of the model whose tokenizer the result has, or to which tokens are added."""
    if choice == "base":
        return "base"
    if choice == "union":
        return "merged" if "merged" in models else "base"
    named = {model.source.name: role for role, model in models.items()}
    named |= {model.source.label: role for role, model in models.items()}
    if choice not in named:
        others = [model.source.label for role, model in models.items() if role != "base"]
        raise ValueError(
            f"tokenizer '{choice}' is neither base nor union nor one of {format_names(others)}"
        )
    return named[choice]


def _number_tokens(
    result: Vocabulary,
    tokens_of: Mapping[str, _Tokens],
    roles: Sequence[str],
    weight_of: Callable[[str, str, Sequence[Holder]], float],
) -> Any:
    """Give new tokens their rows; return the first model's tokenizer if tokens of others were
    added to it.
    """
    base = tokens_of["base"]
    owner = tokens_of[roles[0]]
    for token, row in owner.ids.items():
        row_in_base = base.ids.get(token, row)
        if row_in_base != row:
            raise ValueError(
                f"token '{token}' has number {row} in '{owner.label}' and {row_in_base} in the "
                "base, which the result goes by: choose --tokenizer base or another model's"
            )
    tokenizer = owner.tokenizer
    added: dict[str, Any] = {}
    for role in roles[1:]:
        for token, kind in _tokens_to_add(tokens_of[role], base, owner).items():
            added.setdefault(token, kind)
    if added:
        tokenizer.add_tokens(list(added.values()))
    numbers = tokenizer.get_vocab() if tokenizer else {}
    for role in roles:
        ids = tokens_of[role].ids
        # By number, since a set of strings has another order in every process.
        for token in sorted(ids.keys() - base.ids.keys(), key=ids.__getitem__):
            row = ids[token]
            number = numbers.get(token, row)
            result.tokens.setdefault(number, token)
            holders = result.holders.setdefault(number, [])
            holders.append(Holder(role, row, weight_of(role, token, holders)))
            if tokens_of[role].tokenizer is None:
                result.unnamed.add(number)
    return tokenizer if added else None


def _tokens_to_add(tokens: _Tokens, base: _Tokens, owner: _Tokens) -> dict[str, Any]:
    """Return the added tokens of a model that neither the base nor the owner of the tokenizer
    has.
    """
    if not tokens.tokenizer:
        return {}
    added = {}
    kinds = tokens.tokenizer.added_tokens_decoder
    new = tokens.ids.keys() - base.ids.keys() - owner.ids.keys()
    for token in sorted(new, key=tokens.ids.__getitem__):
        number = tokens.ids[token]
        if number not in kinds:
            raise ValueError(
                f"'{tokens.label}' has token '{token}' in its vocabulary and not among its added "
                f"tokens, which alone can be joined: choose --tokenizer {tokens.label} or base"
            )
        added[token] = kinds[number]
    return added


def _check_columns(result: Vocabulary, base: _Tokens) -> None:
    """Refuse new tokens beside a tensor with a column for each of the base's, which has none for
    them.
    """
    for param, shape in base.model.shapes.items():
        if param.endswith("final_logits_bias") and shape[-1] != result.rows:
            raise ValueError(
                f"the base '{base.label}' has '{param}' for {shape[-1]} tokens, and the result "
                f"would have {result.rows}: load the base, resize its embeddings "
                "(resize_token_embeddings), and save it with a tokenizer that has all tokens"
            )


def _set_files(result: Vocabulary, base: _Tokens, owner: _Tokens, extended: Any) -> None:
    """Give the result a model's tokenizer, or the extended one, and configurations that fit it."""
    files = owner.files
    if extended:
        # How it was opened here, which transformers saves as well.
        for key in ("is_local", "local_files_only"):
            extended.init_kwargs.pop(key, None)
        files = {}
        with tempfile.TemporaryDirectory() as folder:
            extended.save_pretrained(folder)
            for path in Path(folder).rglob("*"):
                if path.is_file():
                    files[path.relative_to(folder).as_posix()] = path.read_bytes()
    if files and files != base.files:
        kept = {name: result.files[name] for name in result.files if name not in base.files}
        result.files = kept | files
    config_of_owner = {}
    if owner is not base:
        config_of_owner = owner.model.source.config
        result.files |= owner.model.checkpoint.small_files("generation_config.json")
    if "config.json" in result.files:
        before = parse_json(result.files["config.json"], dict[str, Any])
        # transformers leaves out a size that is its class's default, with which a grown model
        # would be loaded.
        (before.get("text_config") or before).setdefault("vocab_size", base.rows)
        after = _resized_config(before, config_of_owner, base.rows, result.rows)
        if after != before:
            result.files["config.json"] = json.dumps(after, indent=2).encode()


_TOKENIZER_CONFIG = "tokenizer_config.json"


def _words(files: Mapping[str, bytes]) -> dict[str, Any]:
    """Return the content of a tokenizer's files without chat templates."""
    words: dict[str, Any] = {}
    for name, content in files.items():
        # Models that differ in their templates alone have one vocabulary.
        if name.endswith(".jinja") or name == "chat_template.json":
            continue
        words[name] = content
        if name == _TOKENIZER_CONFIG and b"chat_template" in content:
            config = _read_config(content)
            words[name] = {key: config[key] for key in config if key != "chat_template"}
    return words


_TEMPLATE = "chat_template.jinja"


def _template(files: Mapping[str, bytes]) -> dict[str, bytes]:
    """Return the files of a model's chat templates; those in its configuration become files."""
    template = {name: files[name] for name in files if name.endswith(".jinja")}
    if "chat_template.json" in files:
        template["chat_template.json"] = files["chat_template.json"]
    in_config = _read_config(files.get(_TOKENIZER_CONFIG, b"{}")).get("chat_template")
    # A file wins over the configuration, as in transformers.
    if template or not in_config:
        return template
    if isinstance(in_config, str):
        return {_TEMPLATE: in_config.encode()}
    for each in in_config:
        # The name comes from a file, and must not lead out of the folder.
        name = f"additional_chat_templates/{Path(each['name']).name}.jinja"
        template[_TEMPLATE if each["name"] == "default" else name] = each["template"].encode()
    return template


def _read_config(content: bytes) -> dict[str, Any]:
    """Return a tokenizer's configuration, empty if it is damaged."""
    try:
        return parse_json(content, dict[str, Any])
    except ValueError:
        return {}


def _with_template(files: Mapping[str, bytes], models: Sequence[_Tokens]) -> dict[str, bytes]:
    """Return the files of a result with the first chat template of some models."""
    templates = [tokens.template for tokens in models if tokens.template]
    template_now = _template(files)
    if not templates or templates[0] == template_now:
        return dict(files)
    kept = {name: files[name] for name in files if name not in template_now}
    return kept | templates[0]


def _resized_config(config: Any, own: Any, before: int, rows: int) -> Any:
    """Return a configuration for this many rows, with the special tokens' numbers of another
    one.
    """
    if not isinstance(config, dict) or not isinstance(own, dict):
        return config
    changed = {}
    for key, value in config.items():
        changed[key] = _resized_config(value, own.get(key, {}), before, rows)
    for key, value in own.items():
        if key.endswith("_token_id"):
            changed[key] = value
    # Another size is that of another vocabulary, which a part of the model may have.
    if config.get("vocab_size") == before:
        changed["vocab_size"] = rows
    return changed


def _warnings(result: Vocabulary, base: _Tokens, tokens: _Tokens) -> Iterator[str]:
    if not tokens.is_like(base) and tokens.tokenizer is None:
        yield (
            f"the rows of '{tokens.label}' and the base are matched by their numbers: "
            f"{tokens.why_unknown}"
        )
    lost = sorted(tokens.all.keys() - base.all.keys() - set(result.tokens.values()))
    if lost:
        yield (
            f"'{tokens.label}' has tokens that the result does not have "
            f"(tokenizer={result.tokenizer}): {format_names(lost)}"
        )
