"""The tiny demo, built once for all tests of a session, in a folder that goes away."""

import pytest


@pytest.fixture(scope="session")
def demo_cache(tmp_path_factory):
    """A cache holding the tiny demo, complete."""
    cache = tmp_path_factory.mktemp("cache")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("NUFILT_DEMO", "tiny")
        patch.setenv("NUFILT_CACHE", str(cache))
        from fusion_bench_nufilt.demo import demo_folder

        demo_folder()
    return cache


@pytest.fixture
def demo(demo_cache, monkeypatch):
    """The finished folder of the tiny demo, with the environment pointing at it."""
    monkeypatch.setenv("NUFILT_DEMO", "tiny")
    monkeypatch.setenv("NUFILT_CACHE", str(demo_cache))
    from fusion_bench_nufilt.demo import demo_folder

    return demo_folder()
