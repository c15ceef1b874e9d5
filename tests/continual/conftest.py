"""FusionBench's program, run in this process; and runs without their pages."""

import pytest
from fusion_bench.utils import instantiate
from hydra.core.hydra_config import HydraConfig
from omegaconf import OmegaConf

from fusion_bench_nufilt.compare.configs import compose_run
from fusion_bench_nufilt.continual import algorithm

LEFT_OUT = ("letters", "typefaces", "textures", "counts", "arrows")


@pytest.fixture
def pages():
    """For a test that looks at the page of a run, or at its pictures."""


@pytest.fixture(autouse=True)
def no_pages(request, monkeypatch):
    """Drawing takes half of a run of tiny models; what is drawn is tested in tests/pages."""

    def draw_nothing(*args):
        pass

    if "pages" not in request.fixturenames:
        monkeypatch.setattr(algorithm, "try_write_report", draw_nothing)


@pytest.fixture
def program(demo, tmp_path, monkeypatch):
    """Run the program on three models of the demo, with other words on its command line; return
    its log directory.
    """
    logs = tmp_path / "logs"

    def run(*words):
        hydra = {"runtime": {"cwd": str(tmp_path), "output_dir": str(logs)}}
        hydra["overrides"] = {"task": list(words)}
        monkeypatch.setattr(HydraConfig.instance(), "cfg", OmegaConf.create({"hydra": hydra}))
        settings = ("method.max_steps=1", "print_config=false", f"path.log_dir={logs}")
        left_out = [f"~modelpool.models.{name}" for name in LEFT_OUT]
        models = ("modelpool=nufilt_demo", *left_out)
        instantiate(compose_run(["method=nufilt", *settings, *models, *words])).run()
        return logs

    return run
