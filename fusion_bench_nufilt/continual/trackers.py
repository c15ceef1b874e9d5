"""Pictures for the trackers of a run, which get numbers through Fabric."""

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

log = logging.getLogger(__name__)


def log_picture(loggers: Sequence[Any], name: str, file: Path, step: int) -> None:
    """Give a picture to the trackers that take some: TensorBoard, Weights & Biases, SwanLab, MLflow.

    A tracker that fails is a warning, since the run is done and its files are there.
    """
    for logger in loggers:
        try:
            if hasattr(logger, "log_image"):  # Weights & Biases, SwanLab
                logger.log_image(name, [str(file)], step=step)
            elif hasattr(logger.experiment, "add_image"):  # TensorBoard
                pixels = np.asarray(Image.open(file).convert("RGB"))
                logger.experiment.add_image(name, pixels, step, dataformats="HWC")
            elif hasattr(logger.experiment, "log_artifact"):  # MLflow
                logger.experiment.log_artifact(logger.run_id, str(file))
        except Exception as error:
            log.warning("%s did not take the picture '%s': %s", type(logger).__name__, name, error)
