"""Secrets are taken out, and what only looks like one stays. All are made here, at random."""

from __future__ import annotations

import base64
import hashlib
import random
import string
import time
import uuid
from typing import Any

import pytest

from warmstart.scrub import REDACTED, scrub, scrub_names

_random = random.Random(7)
HEX = "0123456789abcdef"
LETTERS = string.ascii_letters + string.digits
AWS = string.ascii_uppercase + "234567"


def some(count: int, letters: str = LETTERS) -> str:
    return "".join(_random.choice(letters) for _ in range(count))


def b64(data: bytes) -> str:
    return base64.urlsafe_b64encode(data).decode().rstrip("=")


JWT = ".".join([b64(b'{"alg":"HS256","typ":"JWT"}'), b64(b'{"sub":"1234567890","iat":1516239022}'), some(43)])

#: Known by their form, wherever they stand.
BY_FORM = {
    "aws": "AKIA" + some(16, AWS),
    "github": "ghp_" + some(36),
    "github fine-grained": "github_pat_" + some(22) + "_" + some(59),
    "gitlab": "glpat-" + some(20),
    "slack": f"xoxb-{some(12, '123456789')}-{some(12, '123456789')}-{some(24)}",
    "stripe": "sk_live_" + some(24),
    "openai": f"sk-proj-{some(74)}T3BlbkFJ{some(74)}",
    "anthropic": f"sk-ant-api03-{some(93)}AA",
    "google": "AIza" + some(35),
    "npm": "npm_" + some(36),
    "pypi": "pypi-AgEIcHlwaS5vcmc" + some(60),
    "sendgrid": f"SG.{some(22)}.{some(43)}",
    "hugging face": "hf_" + some(34, string.ascii_letters),
    "jwt": JWT,
    "warmstart": "ws_sk_" + some(43),
}

#: Known by what stands around them.
BY_PLACE = {
    "aws_secret_access_key = {}": some(40),
    "DB_PASSWORD={}": "Tr0ub4dor-and-3",
    "password: {}": "hunter2hunter2",
    '{{"password": "{}"}}': "correct-horse7",
    "the password is {} for the staging db": "Xk29_fooBar!7",
    "const apiKey = '{}';": some(32),
    "export API_KEY={}": some(32, HEX),
    "curl -H 'Authorization: Bearer {}' https://x.example.com": some(40),
    "curl -H 'Authorization: Basic {}' https://x.example.com": b64(b"admin:s3cr3tPassw0rd"),
    "curl -u admin:{} https://x.example.com": "s3cr3tPassw0rd",
    "postgres://app:{}@db.internal:5432/app": "s3cr3tPw9",
    "mysql://root:{}@10.0.0.1/app": "Pa55w0rd!",
    "mongodb+srv://u:{}@cluster0.example.net/db": "fj2k3Jf02kd",
    "redis://:{}@cache:6379/0": "a8sd7f6a8s7df6",
    "amqp://guest:{}@mq:5672/": "gu3stpw9",
    "Server=db;Database=app;User Id=sa;Password={};": "Sup3rS3cret!",
    "git clone https://bob:{}@git.example.com/x.git": some(20),
    "SECRET_KEY = '{}'": "django-insecure-" + some(40),
    "AccountName=acc;AccountKey={};EndpointSuffix=core.windows.net": b64(_random.randbytes(64)) + "==",
    "client_secret={}": some(40),
    "psycopg.connect(host='db', user='u', password='{}')": "p4ssw0rdX9",
    "token: {}": some(40, HEX),
    "mysql -u root --password={} app": "q1w2e3r4T5",
    "https://x.example.com/?password={}&x=1": "hunter2hunter2",
    # a comment that makes the scanner look away in a repository
    "{} # gitleaks:allow": "ghp_" + some(36),
    "{} // betterleaks:allow": "ghp_" + some(36),
    # the scanner's strings end at a NUL
    "before\0{} behind": "ghp_" + some(36),
}

_BODY = "\n".join(some(64) for _ in range(25))
_IMAGE = base64.b64encode(_random.randbytes(600)).decode()

HARMLESS = [
    str(uuid.UUID(int=_random.getrandbits(128))),
    f"commit {some(40, HEX)}",
    some(40, HEX),
    f"docker.io/library/redis@sha256:{some(64, HEX)}",
    hashlib.sha256(b"x").hexdigest(),
    f"the content_hash is {some(64, HEX)}",
    f"integrity sha512-{base64.b64encode(_random.randbytes(64)).decode()}",
    f"data:image/png;base64,{_IMAGE}",
    f"https://github.com/owner/repo/commit/{some(40, HEX)}",
    "mem_01jnay9zk0e5fr3v8c2xq7t4hw",
    "see src/app/store/predicates.py:42 in function get_user_by_id_and_namespace",
    "what is the password policy for new users?",
    "why is the api key rejected with 401?",
    "rename the variable secretKey to signingKey",
    "def check_password(password: str) -> bool:",
    "password = getpass.getpass()",
    "api_key=os.environ['API_KEY']",
    "API_KEY=${API_KEY}",
    "password: <your password>",
    "token = request.headers.get('Authorization')",
    "max_tokens=4096",
    "the secret is in AnotherServiceConfiguration",
    "token is InvalidTokenException",
    "secretName: my-secret-2",
    "private_key_path: /etc/ssl/private/key1.pem",
    "postgres://localhost:5432/app",
    f"public key: ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAI{some(43)}",
    f"-----BEGIN CERTIFICATE-----\n{_BODY}\n-----END CERTIFICATE-----",
    "Authorization: Bearer <key>",
    "how do I rotate the secret in AWS Secrets Manager?",
    "wo wird das Passwort gesetzt? Der Schlüssel fehlt.",
    "密码在哪里设置？",
    "author: Jane Doe <jane@example.com>",
    "tokens: 393, secret: true, primary key: user_id",
    "",
]


@pytest.mark.parametrize("name", BY_FORM)
def test_a_secret_is_known_by_its_form(name: str) -> None:
    secret = BY_FORM[name]
    for text in (f"use {secret} here", f"first line\nkey={secret}\nlast line", f'{{"k": "{secret}"}}'):
        assert secret not in scrub(text)
        assert REDACTED in scrub(text)


@pytest.mark.parametrize("place", BY_PLACE)
def test_a_secret_is_known_by_its_place(place: str) -> None:
    secret = BY_PLACE[place]
    scrubbed = scrub(place.format(secret))
    assert secret not in scrubbed
    assert scrubbed.count(REDACTED) == 1
    assert scrubbed.startswith(place.replace("{{", "{").partition("{}")[0][:8]), "what is no secret stays"


@pytest.mark.parametrize("kind", ["RSA ", "", "OPENSSH ", "EC "])
def test_private_keys(kind: str) -> None:
    key = f"-----BEGIN {kind}PRIVATE KEY-----\n{_BODY}\n-----END {kind}PRIVATE KEY-----"
    for text in (key, key.replace("\n", "\\n"), key[:900]):
        scrubbed = scrub(f"use this: {text}")
        assert _BODY[:64] not in scrubbed
        assert scrubbed.startswith("use this: ")


@pytest.mark.parametrize("text", HARMLESS)
def test_what_is_no_secret_stays(text: str) -> None:
    assert scrub(text) == text


def test_a_secret_that_stands_twice_goes_twice() -> None:
    secret = BY_FORM["github"]
    assert secret not in scrub(f"{secret} and again {secret}")


def test_values_go_by_the_names_they_have() -> None:
    data: dict[str, Any] = {
        "db": {"password": "short", "user": "app"},
        "list": [{"apiToken": "abc"}, {"client_secret": "x"}],
        "secrets_file": "/run/secrets",
        "token": 5,
    }
    assert scrub_names(data) == {
        "db": {"password": REDACTED, "user": "app"},
        "list": [{"apiToken": REDACTED}, {"client_secret": REDACTED}],
        "secrets_file": "/run/secrets",
        "token": 5,
    }


@pytest.mark.parametrize(
    "text",
    [
        "a_" * 8000,
        "a." * 8000,
        "password: " * 1600,
        "-----BEGIN PRIVATE KEY-----" * 600,
        "http://" * 2500,
        "x" * 16_000,
    ],
)
def test_no_text_takes_long(text: str) -> None:
    scrub("the rules are loaded")
    started = time.process_time()
    scrub(text)
    assert time.process_time() - started < 2
