import ipaddress
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_webrl.browser import AllowList


@given(st.ip_addresses())
def test_no_address_that_is_not_public_is_ever_permitted(
    address: ipaddress.IPv4Address | ipaddress.IPv6Address,
) -> None:
    """Whatever the host is called, unless it is said to be private; metadata not even then."""
    allow = AllowList(hosts=frozenset({"*"}))
    said = replace(allow, private=frozenset({"*"}))
    if allow.permits_address("host", 80, address):
        assert address.is_global
        assert not address.is_multicast
    if address.is_link_local:
        assert not said.permits_address("host", 80, address)


@pytest.mark.parametrize(
    ("pattern", "named", "others"),
    [
        ("site.org", ["site.org", "SITE.org."], ["sub.site.org", "site.org.evil.net", "mysite.org"]),
        ("*.site.org", ["site.org", "a.b.site.org"], ["mysite.org", "site.org.evil.net"]),
        ("site.org:8080", [], ["site.org"]),
        ("site.org:80", ["site.org"], []),
        ("*", ["anything.at.all"], []),
    ],
)
def test_host_patterns(pattern: str, named: list[str], others: list[str]) -> None:
    allow = AllowList(hosts=frozenset({pattern}))
    assert all(allow.permits(f"http://{host}/x") for host in named)
    assert not any(allow.permits(f"http://{host}/x") for host in others)
    denied = replace(AllowList(hosts=frozenset({"*"})), denied=frozenset({pattern}))
    assert not any(denied.permits(f"http://{host}/x") for host in named)
