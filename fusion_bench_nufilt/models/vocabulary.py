"""The vocabulary of a result: which token has which row of the embeddings, where models brought new
tokens.

Rows are matched by token. The rows of the base's tokens are merged or averaged like any weight; the
row of a new token is the mean over the models that have it.
"""

import hashlib
import json
import tempfile
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

from fusion_bench_nufilt.utils.files import parse_json
from fusion_bench_nufilt.utils.manifest import state_key

from .entries import Grown, PartOfMean
from .model import ModelWeights
from .source import format_names

ModelsByRole = Mapping[str, ModelWeights]
"""Models by their role in the merge: base, merged, task 0, ..."""


class Holder(NamedTuple):
    """A model that has a new token."""

    role: str  # in the merge
    row: int  # the token's row in it
    weight: float  # of this row in the mean; of the model merged so far, that of all its tasks


@dataclass
class NewToken:
    """A token of the result that the base lacks."""

    name: str
    holders: list[Holder] = field(default_factory=list)
    is_named: bool = True  # by the tokenizers of all models that have it

    @property
    def weight(self) -> float:
        """The weight of the mean of its rows in that of a later merge."""
        return sum(holder.weight for holder in self.holders)


@dataclass
class Vocabulary:
    """The rows of a result's embeddings; without ``grown``, they are those of the base."""

    models: ModelsByRole = field(default_factory=dict)
    tokenizer: str = "base"  # base, union, or the name of the model whose tokenizer the result has
    rows: int = 0
    new_tokens: dict[int, NewToken] = field(default_factory=dict)  # by their rows in the result
    #: The tensors of the base with a row for every token, with those of new tokens, by param.
    grown: dict[str, Grown] = field(default_factory=dict)
    files: dict[str, bytes] = field(default_factory=dict)  # all small files of the result
    warnings: list[str] = field(default_factory=list)
    identity: str = ""  # a digest of how rows are matched

    @property
    def names(self) -> list[str]:
        """The names of the new tokens."""
        return [token.name for token in self.new_tokens.values()]

    def labels(self, token: NewToken) -> list[str]:
        """Return the labels of the models that have a token."""
        return [self.models[holder.role].source.label for holder in token.holders]

    def as_dict(self) -> dict[str, Any]:
        """Return the manifest's entry."""
        if not self.grown:
            return {}
        tokens = self.new_tokens.values()
        return {
            "tokenizer": self.tokenizer,
            "rows": self.rows,
            "new_tokens": {token.name: ", ".join(self.labels(token)) for token in tokens},
            "token_weights": {token.name: token.weight for token in tokens if token.weight != 1},
            "matching": self.identity,
        }

    def __str__(self) -> str:
        text = f"{self.tokenizer}, {self.rows} rows, {len(self.new_tokens)} new tokens"
        if self.new_tokens:
            text += f": {format_names(self.names)}"
        return text

    def check(self) -> None:
        """Refuse rows that no tokenizer names and that differ between models: they may be those of
        different tokens. Models still on the hub are not compared.
        """
        unnamed = {row: token for row, token in self.new_tokens.items() if not token.is_named}
        for param, grown in self.grown.items():
            for row, token in unnamed.items():
                if grown.differs(row):
                    labels = self.labels(token)
                    raise ValueError(
                        f"token '{token.name}' is new in {format_names(labels)} with "
                        f"different rows of '{param}': --tokenizer {labels[0]} takes that model's "
                        "tokens alone, --tokenizer base none"
                    )


TOKENIZER_FILES = (
    r"(.*token.*|special_tokens_map|vocab|chat_template)\.json"
    r"|(vocab|merges)\.txt|.*\.(model|tiktoken|jinja)"
)


class _Tokens:
    """The tokens of a model and their rows. Rows whose tokens are unknown are named by their
    numbers.
    """

    def __init__(
        self,
        model: ModelWeights,
        params: Sequence[str],
        base: "_Tokens | None" = None,
        kept: ModelWeights | None = None,
    ) -> None:
        self.model = model
        self.kept = kept  # the state beside the model
        self.label = model.source.label
        self._base = base
        # What a model lacks, as a classifier does the head of a language model, tells no rows.
        own = {**model.head, **model.entries}
        self.own = {param: own[param] for param in params if param in own}
        if kept is not None:
            # With all digits of its means.
            for param, entry in self.own.items():
                self.own[param] = kept.entries.get(state_key(param), entry)
        rows = [entry.shape[0] for entry in self.own.values() if entry.is_stored]
        if base is not None and not rows:
            rows.append(base.rows)
        self.rows: int = min(rows)
        self.files = model.checkpoint.small_files(TOKENIZER_FILES)
        self.words, self.template = _words_and_template(self.files)

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
            if entry is None or not entry.is_stored:
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
    models: ModelsByRole,
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
    gets those of new tokens at its end (:meth:`.entries.Grown.grow`).

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
            tokens = _Tokens(model, params, base, kept if role == "merged" else None)
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
    result = Vocabulary(models, name, files=dict(files))

    def weight_of(role: str, token: str, holders: Sequence[Holder]) -> float:
        if role == "merged":
            return token_weights.get(token, 1.0)
        if first_alone:
            return 0.0 if holders else 1.0
        return max(models[role].coefficient, 0.0)

    extended = _number_tokens(result, tokens_of, roles, weight_of)
    result.rows = max([base.rows, *(row + 1 for row in result.new_tokens)])
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
        if tokens is not base:
            _match_rows(result, base, tokens, params, layers)
    for param in params:
        grown = _grown(result, tokens_of, param)
        result.grown[param] = grown
        if param not in layers:
            base.model.entries[param] = grown
        without = [result.new_tokens[row].name for row in sorted(grown.rows_of_no_model)]
        if without:
            result.warnings.append(
                f"no model has rows of '{param}' for {format_names(without)}: these get the mean "
                "of the base's"
            )
    for token in result.new_tokens.values():
        for holder in token.holders:
            model = models[holder.role]
            model.gives_rows_of.update(model.entries.keys() & set(params))
    result.check()
    holders = {row: token.holders for row, token in result.new_tokens.items()}
    matching = repr([result.rows, holders, matched])
    result.identity = hashlib.sha256(matching.encode()).hexdigest()
    return result


def _match_rows(
    result: Vocabulary,
    base: _Tokens,
    tokens: _Tokens,
    params: Sequence[str],
    layers: Collection[str],
) -> None:
    """Have a model, and the state beside it, present the result's rows, of layers the base's."""
    model = tokens.model
    rows = tokens.rows_of(base)
    for param in params:
        entry = model.entries.get(param)
        if entry is None:
            continue
        wanted = rows
        shape = base.own[param].shape
        # An adapter's factors have a row for each of the base's, whatever its tokens are.
        if not entry.is_stored:
            if param in layers or entry.shape != shape:
                continue
            wanted = list(range(base.rows))
        if param not in layers:
            wanted = [-1 if row in result.new_tokens else own for row, own in enumerate(wanted)]
            wanted += [-1] * (result.rows - base.rows)
            shape = (result.rows, *shape[1:])
        if wanted == list(range(entry.shape[0])):
            continue
        model.entries[param] = entry.in_rows(wanted, shape)
        key = state_key(param)
        if tokens.kept is not None and key in tokens.kept.entries:
            tokens.kept.entries[key] = tokens.kept.entries[key].in_rows(wanted, shape)


def _grown(result: Vocabulary, tokens_of: Mapping[str, _Tokens], param: str) -> Grown:
    """Return a tensor of the base with the rows of all new tokens."""
    own = tokens_of["base"].own[param]
    new_rows = {}
    for row, token in result.new_tokens.items():
        parts = []
        for holder in token.holders:
            tokens = tokens_of[holder.role]
            entry = tokens.own.get(param)
            # An adapter has the rows that it was trained on, and what it adds to them.
            if holder.row < own.shape[0] or (entry is not None and entry.is_stored):
                beneath = tokens.model.beneath.get(param, own)
                parts.append(PartOfMean(entry or own, holder.row, holder.weight, beneath))
        new_rows[row] = parts
    return Grown(own.source, own.key, (result.rows, *own.shape[1:]), own, new_rows)


def _owner(models: ModelsByRole, choice: str) -> str:
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
            new = result.new_tokens.setdefault(number, NewToken(token))
            new.holders.append(Holder(role, row, weight_of(role, token, new.holders)))
            if tokens_of[role].tokenizer is None:
                new.is_named = False
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
_TEMPLATE = "chat_template.jinja"


def _words_and_template(files: Mapping[str, bytes]) -> tuple[dict[str, Any], dict[str, bytes]]:
    """Return the content of a tokenizer's files without chat templates, in which alone models of
    one vocabulary may differ, and the files of these; those in its configuration become files.
    """
    words: dict[str, Any] = {}
    template = {}
    for name, content in files.items():
        if name.endswith(".jinja") or name == "chat_template.json":
            template[name] = content
        else:
            words[name] = content
    config = _read_config(files.get(_TOKENIZER_CONFIG, b"{}"))
    if "chat_template" not in config:
        return words, template
    in_config = config.pop("chat_template")
    words[_TOKENIZER_CONFIG] = config
    if isinstance(in_config, str):
        in_config = [{"name": "default", "template": in_config}]
    # A file wins over the configuration, as in transformers.
    if template or not in_config:
        return words, template
    for each in in_config:
        # The name comes from a file, and must not lead out of the folder.
        name = f"additional_chat_templates/{Path(each['name']).name}.jinja"
        template[_TEMPLATE if each["name"] == "default" else name] = each["template"].encode()
    return words, template


def _read_config(content: bytes) -> dict[str, Any]:
    """Return a tokenizer's configuration, empty if it is damaged."""
    try:
        return parse_json(content, dict[str, Any])
    except ValueError:
        return {}


def _with_template(files: Mapping[str, bytes], models: Sequence[_Tokens]) -> dict[str, bytes]:
    """Return the files of a result with the first chat template of some models."""
    templates = [tokens.template for tokens in models if tokens.template]
    _, template_now = _words_and_template(files)
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
    lost = sorted(tokens.all.keys() - base.all.keys() - set(result.names))
    if lost:
        yield (
            f"'{tokens.label}' has tokens that the result does not have "
            f"(tokenizer={result.tokenizer}): {format_names(lost)}"
        )
