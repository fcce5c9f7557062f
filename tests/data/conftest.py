"""Makes the network unreachable for tests of data sets."""

import urllib.request

import pytest


@pytest.fixture
def offline(monkeypatch):
    """Makes the network unreachable by a proxy that does not answer."""
    for scheme in ('http', 'https'):
        monkeypatch.setenv(scheme + '_proxy', 'http://127.0.0.1:9')
        monkeypatch.delenv(scheme.upper() + '_PROXY', raising=False)
    monkeypatch.setattr(urllib.request, '_opener', None)  # it keeps the proxy of its first use
    for variable in ('no_proxy', 'NO_PROXY'):
        monkeypatch.delenv(variable, raising=False)
