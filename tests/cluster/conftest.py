"""One cluster for all tests of this folder."""

from collections.abc import Iterator

import pytest

from tests.cluster.cluster import Cluster
from tests.cluster.hosts import ClusterError


@pytest.fixture(scope="session")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Three hosts that claim 8 cores each, and a login host. Where they cannot be had, the tests fail."""
    try:
        made = Cluster(tmp_path_factory.mktemp("cluster"))
    except ClusterError as error:
        pytest.fail(str(error), pytrace=False)
    with made:
        yield made
