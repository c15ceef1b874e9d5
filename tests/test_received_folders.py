"""A folder of somebody else is read, and never acted upon: nothing in it is instantiated, imported
or run, no path in it leads elsewhere, and HTML in it stays text. Whatever is in a field, it is
refused, or does nothing.
"""

import json
import shutil
from contextlib import closing, suppress
from html.parser import HTMLParser
from itertools import chain, cycle, islice

import pytest
import yaml
from fusion_bench import BaseModelPool

from fusion_bench_nufilt import LayerwiseMergingAlgorithm, load_task
from fusion_bench_nufilt.analysis.record import known_moments
from fusion_bench_nufilt.cli.merging import settings_to_continue
from fusion_bench_nufilt.compare.store import Store
from fusion_bench_nufilt.continual.models import merged_before
from fusion_bench_nufilt.continual.run_folder import RunFolder
from fusion_bench_nufilt.pages.write import write_results
from fusion_bench_nufilt.utils.files import write_json
from tests.adversary.entry_points import VALUES, changed, in_place_of, places
from tests.cli.helpers import nufilt
from tests.compare.helpers import TASKS as COMPARED
from tests.compare.test_run import CHEAP, THREE, run
from tests.compare.test_store import RUN, SETTINGS, SPEC
from tests.continual.helpers import logging_to, pool, saved_pool
from tests.merge.helpers import RANKS, change_json, merge, save_stream
from tests.merge.test_heads import save as save_classifiers
from tests.models.test_adapters import random_adapter as save_adapter
from tests.pages.helpers import FOLDERS
from tests.tiny_models import llama

HTML = '<script src="received"></script><img src="received" onerror="received">'
OUTSIDE = "../../received"


@pytest.fixture(autouse=True)
def home(tmp_path, monkeypatch):
    """A folder in folders; nothing but what a test writes there comes to be."""
    home = tmp_path / "a" / "b"
    home.mkdir(parents=True)
    monkeypatch.chdir(home)
    yield home
    assert sorted(path.name for path in tmp_path.rglob("*received*")) == []
    assert {path.name for path in tmp_path.iterdir()} <= {"a", "nufilt_demo"}
    assert {path.name for path in (tmp_path / "a").iterdir()} == {"b"}


def attack(home):
    """What Hydra would call, as further fields of a mapping."""
    command = f"touch {home / 'received'}"
    return {"_target_": "os.system", "command": command, "_partial_": False}


def texts(home):
    """A path, a tag of YAML, and HTML, in place of any other string."""
    return [OUTSIDE, f"!!python/object/apply:os.system ['touch {home / 'received'}']", HTML]


def everywhere(content, change):
    """Return a content with each of its mappings and strings changed."""
    if isinstance(content, dict):
        return change({key: everywhere(value, change) for key, value in content.items()})
    if isinstance(content, list):
        return [everywhere(value, change) for value in content]
    return change(content)


def attacked(content, home):
    """Yield a content with the fields of :func:`attack` in all of its mappings, and with one of
    :func:`texts` in place of all strings; then the same at one place after the other, of names of
    one kind the first one's.
    """
    further = attack(home)
    yield everywhere(content, lambda old: {**old, **further} if isinstance(old, dict) else old)
    for text in texts(home):
        yield everywhere(content, lambda old, new=text: new if isinstance(old, str) else old)
    for place in places(content):
        value = content
        for key in place:
            value = value[key]
        if isinstance(value, dict):
            yield changed(content, place, {**value, **further})
            for text in texts(home):
                yield changed(content, place, {**value, text: text})
        elif isinstance(value, str):
            for new in [*texts(home), further]:
                yield changed(content, place, new)


def mistaken(content):
    """Yield a content with one of the wrong values, in turn, at one place after the other."""
    for place, value in zip(places(content), cycle(VALUES.values()), strict=False):
        yield changed(content, place, value)


def for_each_attack(file, home, use, most=None):
    """Call ``use`` with each attack and mistake in a JSON file, or with the first ones; it may be
    refused.
    """
    content = json.loads(file.read_text())
    attempts = chain(attacked(content, home), mistaken(content))
    for attempt in islice(attempts, most):
        with in_place_of(file, json.dumps(attempt)), suppress(ValueError):
            use()


class _Page(HTMLParser):
    def handle_starttag(self, tag, attrs):
        assert "received" not in dict(attrs).values()


@pytest.mark.slow
@pytest.mark.parametrize("kind", FOLDERS)
def test_a_page_of_a_received_folder_shows_text(kind, home, monkeypatch):
    monkeypatch.setattr("fusion_bench_nufilt.pages.write.save_picture", lambda *_: None)
    folder = FOLDERS[kind](home / kind)

    def report():
        write_results(folder)
        _Page().feed((folder / "index.html").read_text())

    for file in sorted(folder.glob("*.json")):
        for_each_attack(file, home, report, most=4)
        for attempt in islice(mistaken(json.loads(file.read_text())), 0, None, 12):
            with in_place_of(file, json.dumps(attempt)), suppress(ValueError):
                report()
    for table in sorted(folder.glob("*.csv")):
        titles, *rows = table.read_text().splitlines()
        rows[-1] = ",".join([HTML] * (titles.count(",") + 1))
        with in_place_of(table, "\n".join([titles, *rows])), suppress(ValueError):
            report()


@pytest.mark.slow
def test_an_analysis_is_made_again_in_a_received_folder(home):
    folder = home / "moments"
    folder.mkdir()
    recorded = {"about": {"task": "a"}, "owner": {"x": "x"}, "tokens": 1}
    write_json(folder / "about.json", {**recorded, "files": {"m": {"size": 1, "sha256": "0"}}})
    for_each_attack(folder / "about.json", home, lambda: known_moments(folder, {"task": "a"}))
    save_stream(home, llama(), tasks=1)
    analysis = FOLDERS["analysis"](home / "analysis")
    change_json(analysis / "analysis.json", **attack(home))
    models = ("--base", home / "base", "--task", home / "task1")
    code, text = nufilt("analyze", *models, "--out", analysis)
    assert code == 0, text


def test_a_comparison_goes_on_in_a_received_folder(home):
    with closing(Store(home / "store", SETTINGS)) as store:
        store.save(SPEC, RUN)
        scores = dict.fromkeys(COMPARED, 0.5)
        store.save_references({"pretrained": scores, "individual": scores})
        store.identify({"a": "1"})

    def go_on():
        with closing(Store(home / "store", SETTINGS)) as store:
            store.load(SPEC, RUN.config, RUN.tasks)
            store.load_references(COMPARED)
            store.identify({"a": "1"})

    for file in sorted((home / "store").rglob("*.json")):
        for_each_attack(file, home, go_on)


@pytest.mark.slow
@pytest.mark.usefixtures("demo")
def test_a_method_in_a_received_comparison_is_compared_and_not_made(home):
    out = home / "out"
    run(out, "weight_average", overrides=THREE, **CHEAP)
    (file,) = out.glob("runs/*/42.json")
    change_json(file, config=attack(home))
    with pytest.raises(ValueError, match="with other settings: _target_ is"):
        run(out, "weight_average", overrides=THREE, **CHEAP)


def test_a_run_goes_on_from_a_received_folder(home):
    models = pool(2)
    options = {"shuffle_order": False, "evaluate": "last", **RANKS}
    algorithm = LayerwiseMergingAlgorithm("nufilt", **options)
    logging_to(home / "run", algorithm).run({**models})
    folder = home / "run" / "checkpoints" / "merged_model_1"

    def resume():
        log_directory = RunFolder(home / "run")
        log_directory.refuse_other_run(json.loads((home / "good.json").read_text()))
        log_directory.newest_step(1, 2)

    shutil.copy(home / "run" / "run.json", home / "good.json")
    entries = {"_pretrained_": "x", "c": "y", "_merged_": str(folder)}
    for_each_attack(home / "run" / "run.json", home, resume)
    manifest = folder / "nufilt.json"
    for_each_attack(manifest, home, resume)
    pool_of_names = BaseModelPool(entries)
    for_each_attack(manifest, home, lambda: merged_before(pool_of_names, None, verify=True))
    change_json(manifest, **attack(home))
    new = saved_pool(home, {"_pretrained_": models["_pretrained_"], "third": models["task1"]})
    new._models["_merged_"] = str(folder)
    LayerwiseMergingAlgorithm("nufilt", verify=False, **options).run(new)


def test_a_merge_goes_on_from_a_received_folder(home):
    save_stream(home, llama(), tasks=2)
    manifest = merge(home, ["task1"], "one") / "nufilt.json"
    content = json.loads(manifest.read_text())
    write_json(manifest, {**content, "layers": {}})
    for_each_attack(manifest, home, lambda: settings_to_continue({"merged": "one"}))
    command = ("merge", "--task", "task2", "--merged", "one", "--out", "out")
    for_each_attack(manifest, home, lambda: nufilt(*command, "--dry-run"), most=4)
    change_json(manifest, settings={**content["settings"], **attack(home)}, **attack(home))
    code, text = nufilt(*command)
    assert code == 0, text


def test_a_recipe_is_read_as_text(home):
    recipe = {"base": "base", "tasks": ["task1"], "out": "new", "settings": {"null_rank": 3}}
    for attempt in attacked(recipe, home):
        (home / "recipe.yaml").write_text(yaml.safe_dump(attempt))
        nufilt("merge", "recipe.yaml", "--dry-run")
    for name in recipe:
        _, tag, _ = texts(home)
        lines = [f"{key}: {tag if key == name else json.dumps(recipe[key])}" for key in recipe]
        (home / "recipe.yaml").write_text("\n".join(lines))
        code, text = nufilt("merge", "recipe.yaml", "--dry-run")
        assert code == 1
        assert "the recipe 'recipe.yaml' can't be read: could not determine a constructor" in text


def test_no_kernel_that_a_base_names_is_loaded_for_what_reads_its_adapters(home):
    save_adapter(home / "task", home / "whole", llama(), seed=0)
    llama().save_pretrained(home / "base")
    change_json(home / "base" / "config.json", attn_implementation="somebody/kernel")
    merge(home, ["task"], base="base", settings={"adapter": True})


def test_a_head_of_a_received_folder_is_of_a_model_and_of_no_other_code(home):
    (task, *_) = models = save_classifiers(home, "vit")
    out = merge(home, list(models))
    manifest = json.loads((out / "nufilt.json").read_text())
    head = manifest["heads"][task]["config"]
    head |= {"attn_implementation": "somebody/kernel", **attack(home)}
    write_json(out / "nufilt.json", manifest)
    assert load_task(out, task).config._attn_implementation in ("sdpa", "eager")
    head["architectures"] = ["AutoModel"]
    write_json(out / "nufilt.json", manifest)
    with pytest.raises(ValueError, match="transformers has no class 'AutoModel' for the head"):
        load_task(out, task)
