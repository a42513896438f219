#!/bin/bash
# What the official image does at its first start, as far as the stack uses it.
set -euo pipefail
: "${POSTGRES_PASSWORD:?must be set}"
if [ ! -s "$PGDATA/PG_VERSION" ]; then
  initdb --username="${POSTGRES_USER:-postgres}" --pwfile=<(printf '%s\n' "$POSTGRES_PASSWORD") \
    --auth-local=trust --auth-host=scram-sha-256 --encoding=UTF8 --locale=C.UTF-8
  echo "host all all all scram-sha-256" >>"$PGDATA/pg_hba.conf"
  pg_ctl -w start -o "-c listen_addresses=''"
  db=${POSTGRES_DB:-${POSTGRES_USER:-postgres}}
  [ "$db" = postgres ] || createdb --username="${POSTGRES_USER:-postgres}" --maintenance-db=postgres "$db"
  pg_ctl -m fast -w stop
fi
exec "$@" -c listen_addresses='*'
