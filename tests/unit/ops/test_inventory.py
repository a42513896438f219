"""What an operator may write into an inventory, and what is said of what he may not."""

from __future__ import annotations

from pathlib import Path

import pytest

from ops.inventory import InventoryError, Target, given_secrets, load

EXAMPLE = Path(__file__).resolve().parents[3] / "ops" / "inventories" / "example.py"


def write(folder: Path, data: str, host: str = "203.0.113.10") -> Path:
    path = folder / "prod.py"
    path.write_text(f"hosts = [({host!r}, {data})]")
    return path


def faults(path: Path) -> str:
    with pytest.raises(InventoryError) as caught:
        load(path)
    return str(caught.value)


def test_the_example_is_a_valid_inventory() -> None:
    target = load(EXAMPLE)
    assert (target.host, target.url) == ("203.0.113.10", "https://memory.example.com")


def test_without_a_file_the_way_to_one_is_told(tmp_path: Path) -> None:
    assert "cp ops/inventories/example.py" in faults(tmp_path / "prod.py")


@pytest.mark.parametrize("text", ["hosts = []", "hosts = ['a', 'b']", "host = 'a'", "hosts = [('a', 1)]", "hosts = 1"])
def test_it_names_exactly_one_host(tmp_path: Path, text: str) -> None:
    path = tmp_path / "prod.py"
    path.write_text(text)
    assert "host" in faults(path)


def test_a_file_that_fails_is_named_with_its_error(tmp_path: Path) -> None:
    path = tmp_path / "prod.py"
    path.write_text("import nothing_of_this_name")
    assert "ModuleNotFoundError" in faults(path)


def test_all_faults_are_told_at_once(tmp_path: Path) -> None:
    said = faults(write(tmp_path, "{'domain': 'no domain', 'ssh_port': 0, 'colour': 'red', 'images': 'push'}"))
    assert all(word in said for word in ("domain", "ssh_port", "colour", "no such field", "images"))


@pytest.mark.parametrize("data", ["{}", "{'domain': 'a.example.com', 'address': '203.0.113.10'}"])
def test_it_is_reached_by_a_domain_or_an_address(tmp_path: Path, data: str) -> None:
    assert "either `domain`, or `address`" in faults(write(tmp_path, data))


@pytest.mark.parametrize(
    ("data", "url"),
    [
        ("{'domain': 'a.example.com'}", "https://a.example.com"),
        ("{'address': '203.0.113.10', 'https_port': 8443}", "https://203.0.113.10:8443"),
        ("{'address': '2001:db8::1'}", "https://[2001:db8::1]"),
    ],
)
def test_the_url_of_clients(tmp_path: Path, data: str, url: str) -> None:
    assert load(write(tmp_path, data)).url == url


@pytest.mark.parametrize("domain", ["localhost", "-a.example.com", "a..example.com", "203.0.113.10", "a.example.com/x"])
def test_what_is_no_domain_is_refused(tmp_path: Path, domain: str) -> None:
    assert "domain" in faults(write(tmp_path, repr({"domain": domain})))


def test_a_secret_in_the_open_is_refused_and_not_said_again(tmp_path: Path) -> None:
    said = faults(write(tmp_path, "{'address': 'vm', 'secrets': {'DATABASE_URL': 'postgresql://u:hunter2@h/d'}}"))
    assert "DATABASE_URL" in said
    assert "hunter2" not in said


def test_a_secret_among_the_settings_is_refused_and_not_said_again(tmp_path: Path) -> None:
    said = faults(write(tmp_path, "{'address': 'vm', 'settings': {'OPENAI_API_KEY': 'hunter2'}}"))
    assert "belongs into `secrets`" in said
    assert "hunter2" not in said


@pytest.mark.parametrize("name", ["DOMAIN", "MODEL_DIR", "NO_SUCH_SETTING"])
def test_settings_are_those_of_the_stack_that_nothing_else_decides(tmp_path: Path, name: str) -> None:
    assert name in faults(write(tmp_path, repr({"address": "vm", "settings": {name: "x"}})))
    assert load(write(tmp_path, "{'address': 'vm', 'settings': {'TRASH_DAYS': '20'}}")).settings == {"TRASH_DAYS": "20"}


def test_another_postgres_needs_its_address(tmp_path: Path) -> None:
    assert "DATABASE_URL" in faults(write(tmp_path, "{'address': 'vm', 'postgres': False}"))


def test_a_model_folder_has_a_model_in_it(tmp_path: Path) -> None:
    data = {"address": "vm", "model": str(tmp_path / "model")}
    assert "config.json" in faults(write(tmp_path, repr(data)))
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").touch()
    assert load(write(tmp_path, repr(data))).model == data["model"]


def test_alerts_by_mail_need_a_way_to_send_it(tmp_path: Path) -> None:
    assert "smtp" in faults(write(tmp_path, "{'address': 'vm', 'alerts': {'mail_to': 'ops@example.com'}}"))


def test_backups_go_to_places_restic_knows(tmp_path: Path) -> None:
    assert "sftp:" in faults(write(tmp_path, "{'address': 'vm', 'backup': {'offsite': 'ftp://x'}}"))
    assert "at" in faults(write(tmp_path, "{'address': 'vm', 'backup': {'at': '25:00'}}"))


def test_secrets_are_read_where_they_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("A_DSN", "postgresql://somewhere")
    (tmp_path / "key").write_text("from-a-file\n")
    target = Target(
        host="vm",
        address="vm",
        secrets={
            "DATABASE_URL": "env:A_DSN",
            "OPENAI_API_KEY": f"file:{tmp_path / 'key'}",
            "RESTIC_PASSWORD": "command:echo from-a-command",
            # not on this machine: the VM may have it from another's
            "REDIS_PASSWORD": "env:NOT_SET_HERE",
            "POSTGRES_PASSWORD": "file:/no/such/file",
            "AWS_ACCESS_KEY_ID": "command:false",
        },
    )
    assert given_secrets(target) == {
        "DATABASE_URL": "postgresql://somewhere",
        "OPENAI_API_KEY": "from-a-file",
        "RESTIC_PASSWORD": "from-a-command",
    }
