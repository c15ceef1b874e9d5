"""The runs of a comparison on the nodes of a Ray cluster; the driver alone writes what they find."""

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import closing
from typing import Any

from fusion_bench_nufilt.cluster import Place, Team, check_versions, connect, places

from .pairs import Configs, Pair, start_process, work
from .store import Run


class Worker:
    """Runs methods on a node, with models, data and heads of its own; Ray makes it there."""

    def prepare(self, versions: dict[str, str], place: Place, overrides: list[str]) -> None:
        """Make ready for runs.

        Raises:
            ValueError: other versions of the packages than the driver's, or a configuration that is wrong there.
        """
        check_versions(versions)
        start_process(overrides, place.cpus)

    def run(self, config: dict[str, Any], seed: int) -> Run:
        """One method on one seed."""
        return work(config, seed)


def run_on_cluster(configs: Configs, overrides: Sequence[str], address: str | None) -> Iterator[tuple[Pair, Run]]:
    """Run pairs on all GPUs of a cluster, one each, or on all nodes of one without.

    Args:
        configs: of the methods.
        overrides: of `fusion_bench`, for the model pool and the task pool.
        address: of the cluster.

    Raises:
        ValueError: no Ray, no cluster, a node with other versions, or a pair that kills its workers.
    """
    ray = connect(address)
    where = places(ray, gpus=ray.cluster_resources().get("GPU", 0) >= 1)
    with closing(Team(ray, Worker, where, list(overrides))) as team, ThreadPoolExecutor(max(1, team.slots)) as pool:
        pairs = {
            pool.submit(team.call, f"{spec.label}, seed {seed}", "run", config, seed): (spec, seed)
            for (spec, seed), config in configs.items()
        }
        try:
            for future in as_completed(pairs):
                yield pairs[future], future.result()
        finally:  # after an error or an interrupt, what has not begun never does
            pool.shutdown(wait=False, cancel_futures=True)
