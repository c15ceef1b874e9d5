"""FusionBench's program, run in this process."""

import pytest
from fusion_bench.utils import instantiate
from hydra.core.hydra_config import HydraConfig
from omegaconf import OmegaConf

from fusion_bench_nufilt.compare.configs import compose_run

LEFT_OUT = ("letters", "typefaces", "textures", "counts", "arrows")


@pytest.fixture
def program(demo, tmp_path, monkeypatch):
    """Run the program on three models of the demo, with other words on its command line; return
    its log directory.
    """
    logs = tmp_path / "logs"

    def run(*words):
        hydra = {"runtime": {"cwd": str(tmp_path), "output_dir": str(logs)}}
        hydra["runtime"]["choices"] = {"modelpool": "nufilt_demo"}
        hydra["overrides"] = {"task": list(words)}
        monkeypatch.setattr(HydraConfig.instance(), "cfg", OmegaConf.create({"hydra": hydra}))
        settings = ("method.max_steps=1", "print_config=false", f"path.log_dir={logs}")
        left_out = [f"~modelpool.models.{name}" for name in LEFT_OUT]
        models = ("modelpool=nufilt_demo", *left_out)
        instantiate(compose_run(["method=nufilt", *settings, *models, *words])).run()
        return logs

    return run
