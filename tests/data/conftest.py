"""Makes the network unreachable for tests of data sets."""

import pytest


@pytest.fixture
def offline(monkeypatch):
    """Makes the network unreachable by a proxy that does not answer."""
    for scheme in ('http', 'https'):
        monkeypatch.setenv(scheme + '_proxy', 'http://127.0.0.1:9')
        monkeypatch.delenv(scheme.upper() + '_PROXY', raising=False)
    for variable in ('no_proxy', 'NO_PROXY'):
        monkeypatch.delenv(variable, raising=False)
