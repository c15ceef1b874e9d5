"""Work on a cluster, with a stand-in for Ray; `tests/folders/test_cluster.py` has the real one."""

from types import SimpleNamespace

import pytest

from fusion_bench_nufilt.cluster import Place, Team, check_versions, places
from fusion_bench_nufilt.storage.versions import package_versions


class RayError(Exception):
    pass


class RayTaskError(RayError):
    def __init__(self, cause):
        super().__init__("a trace of many lines")
        self.cause = cause


class GetTimeoutError(RayError):
    pass


class Handle:
    """An actor: methods return what is called when the result is asked for."""

    def __init__(self, kind):
        self.worker, self.dead = kind(), False

    def __getattr__(self, method):
        def call(*arguments):
            try:
                return getattr(self.worker, method)(*arguments)
            except RayError:
                raise
            except Exception as error:
                raise RayTaskError(error) from error

        return SimpleNamespace(remote=lambda *arguments: lambda: call(*arguments))


RAY = SimpleNamespace(
    exceptions=SimpleNamespace(RayError=RayError, RayTaskError=RayTaskError, GetTimeoutError=GetTimeoutError),
    util=SimpleNamespace(scheduling_strategies=SimpleNamespace(NodeAffinitySchedulingStrategy=lambda *_, **__: None)),
    remote=lambda kind: SimpleNamespace(options=lambda **_: SimpleNamespace(remote=lambda: Handle(kind))),
    put=lambda value: value,
    wait=lambda results, **_: None,
    get=lambda result, timeout: result(),
    kill=lambda handle: setattr(handle, "dead", True),
)
PLACES = [Place(f"node{i}", str(i), cpus=4, gpu=False, slots=2) for i in range(3)]


class Worker:
    """Dies or raises when told so, by its node."""

    def prepare(self, expected, place, what):
        check_versions(expected)
        self.node, self.what = place.node, what

    def work(self):
        happens = self.what.get(self.node)
        if happens is not None:
            raise happens
        return self.node


def team(**what):
    return Team(RAY, Worker, PLACES, what)


def test_the_work_of_the_dead_is_given_to_others(caplog):
    works = team(node2=RayError("it died\nwith a trace"), node1=RayError("it died"))
    assert works.slots == 6
    assert [works.call("a layer", "work") for _ in range(3)] == ["node0"] * 3
    assert works.slots == 2
    assert [record.getMessage() for record in caplog.records] == [
        f"node {node}: worker lost, others take its work: it died" for node in ("node2", "node1")
    ]


def test_work_that_kills_whoever_does_it_ends_the_run():
    works = team(**{place.node: RayError("it died") for place in PLACES})
    with pytest.raises(ValueError, match="a layer: 3 workers died of it"):
        works.call("a layer", "work")
    with pytest.raises(ValueError, match="no worker lives any more"):
        works.call("a layer", "work")


def test_what_a_worker_refuses_is_refused_with_the_name_of_its_node_and_loses_no_worker():
    works = team(node2=ValueError("layer 'x' has NaN"))
    with pytest.raises(ValueError, match=r"^node node2: layer 'x' has NaN$"):
        works.call("a layer", "work")
    assert works.slots == 6


def test_a_mistake_in_the_program_shows_the_trace():
    with pytest.raises(RuntimeError, match="a trace of many lines"):
        team(node2=KeyError("oops")).call("a layer", "work")


def test_other_versions_are_refused():
    with pytest.raises(ValueError, match=r"it has torch .* where the driver has 0\.1"):
        check_versions({**package_versions(), "torch": "0.1"})


@pytest.mark.parametrize(("gpus", "expected"), [(False, [("a", 8, 1)]), (True, [("b", 4, 1), ("b", 4, 1)])])
def test_workers_are_on_nodes_with_cpus_or_one_for_each_gpu(gpus, expected):
    node = {"Alive": True, "NodeManagerHostname": "a", "NodeID": "0123456789"}
    nodes = [
        {**node, "Resources": {"CPU": 8.0}},
        {**node, "Resources": {"GPU": 2.0, "CPU": 9.0} if gpus else {}, "NodeManagerHostname": "b"},
        {**node, "Resources": {"CPU": 8.0, "GPU": 1.0}, "Alive": False},
    ]
    found = places(SimpleNamespace(nodes=lambda: nodes), gpus=gpus)
    assert [(place.node, place.cpus, place.slots) for place in found] == [
        (f"{name} (01234567)", cpus, slots) for name, cpus, slots in expected
    ]


def test_a_cluster_without_a_gpu_is_said():
    with pytest.raises(ValueError, match="the Ray cluster has no GPU"):
        places(SimpleNamespace(nodes=list), gpus=True)
