# One VM. INVENTORY=path names its file; ARGS="…" goes on to the command, whose help is `make deploy ARGS=--help`.

.PHONY: deploy plan status logs smoke restart ssh exec warmstart keys backup restore drill rollback rotate-secrets migrate-dimension destroy

INVENTORY ?= ops/inventories/prod.py
OPS = $(PY) -m ops --inventory $(INVENTORY)

deploy: $(VENV)/.installed-ops ## take the VM of the inventory to this commit (BREAK_LOCK=yes)
	@$(OPS) deploy $(if $(BREAK_LOCK),--break-lock) $(ARGS)

plan: $(VENV)/.installed-ops ## what a deploy would change
	@$(OPS) plan $(ARGS)

status: $(VENV)/.installed-ops ## the VM: what runs, and how it is
	@$(OPS) status $(ARGS)

logs: $(VENV)/.installed-ops ## the VM's logs (SERVICE=api, ARGS=--follow)
	@$(OPS) logs $(SERVICE) $(ARGS)

smoke: $(VENV)/.installed-ops ## try the VM's memory as a client does
	@$(OPS) smoke

restart: $(VENV)/.installed-ops ## start a container anew, and wait until it is ready (SERVICE=worker)
	@$(OPS) restart $(SERVICE)

ssh: $(VENV)/.installed-ops ## a shell on the VM
	@$(OPS) ssh

exec: $(VENV)/.installed-ops ## a line for the VM's shell (CMD="df -h | tail -1")
	@$(OPS) exec -- sh -c "$$CMD"

warmstart: $(VENV)/.installed-ops ## a command of the memory's program on the VM (ARGS="tenants list")
	@$(OPS) warmstart $(ARGS)

keys: $(VENV)/.installed-ops ## API keys (ARGS="create laptop", "revoke ID"; lists them without)
	@$(OPS) keys $(ARGS)

backup: $(VENV)/.installed-ops ## take a backup now
	@$(OPS) backup $(ARGS)

restore: $(VENV)/.installed-ops ## bring the newest backup back (ARGS="--snapshot ID", "--repository URL")
	@$(OPS) restore $(ARGS)

drill: $(VENV)/.installed-ops ## restore the newest backup aside, and look whether it is whole
	@$(OPS) drill $(ARGS)

rollback: $(VENV)/.installed-ops ## back to the release before
	@$(OPS) rollback $(ARGS)

rotate-secrets: $(VENV)/.installed-ops ## new secrets (ARGS="REDIS_PASSWORD" for one of them)
	@$(OPS) rotate-secrets $(ARGS)

migrate-dimension: $(VENV)/.installed-ops ## vectors of the inventory's model, before its deploy (ARGS=--plan, --rollback)
	@$(OPS) migrate-dimension $(ARGS)

destroy: $(VENV)/.installed-ops ## remove everything from the VM; asks for its name
	@$(OPS) destroy $(ARGS)
