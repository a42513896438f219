-- Bookkeeping only: no table here has a place for a memory's text, title, tags or query.

CREATE TABLE tenants (
    id text PRIMARY KEY,
    name text NOT NULL,
    created_at timestamptz NOT NULL DEFAULT now()
);

CREATE TABLE api_keys (
    id text PRIMARY KEY,
    tenant_id text NOT NULL REFERENCES tenants (id),
    name text NOT NULL,
    -- SHA-256 of the key, in hex; the key itself is kept nowhere
    hash text NOT NULL UNIQUE CHECK (hash ~ '^[0-9a-f]{64}$'),
    prefix text NOT NULL CHECK (length(prefix) <= 10),
    unlimited boolean NOT NULL DEFAULT false,
    created_at timestamptz NOT NULL DEFAULT now(),
    last_used_at timestamptz,
    revoked_at timestamptz
);
CREATE INDEX api_keys_tenant ON api_keys (tenant_id);

-- What LanceDB's embedding_status says, with the history of the attempts; rebuilt from LanceDB.
CREATE TABLE memory_status (
    memory_id text PRIMARY KEY,
    user_id text NOT NULL,
    status text NOT NULL CHECK (status IN ('queued', 'ready', 'failed')),
    attempts integer NOT NULL DEFAULT 0,
    next_attempt_at timestamptz,
    reason text,
    -- the model, revision, width and prefixes its vector was made with
    space jsonb,
    updated_at timestamptz NOT NULL
);
CREATE INDEX memory_status_user ON memory_status (user_id, status);

CREATE TABLE jobs (
    name text PRIMARY KEY,
    last_run_at timestamptz NOT NULL,
    last_error text
);

CREATE TABLE audit (
    id uuid PRIMARY KEY,
    at timestamptz NOT NULL,
    actor text NOT NULL,
    action text NOT NULL,
    subject text NOT NULL,
    detail jsonb NOT NULL DEFAULT '{}'
);
CREATE INDEX audit_at ON audit (at);

-- An event's id, kind, time and hash; its body is not kept.
CREATE TABLE events (
    id text NOT NULL,
    user_id text NOT NULL,
    kind text NOT NULL,
    hash text NOT NULL,
    created_at timestamptz NOT NULL DEFAULT now(),
    PRIMARY KEY (user_id, id)
);
CREATE INDEX events_created_at ON events (created_at);
