# The stack in containers. LOCAL=1: on images made of Debian's packages, where no registry is reached.

.PHONY: up down ps stack-logs build-images test-containers pins-verify

COMPOSE = docker compose --project-directory compose -f compose/compose.yml \
          $(if $(LOCAL),-f compose/compose.local.yml)

up: ## start the stack in containers (LOCAL=1: on images built by build-images)
	@python3 compose/init_env.py
	$(COMPOSE) up --detach --wait --remove-orphans $(if $(LOCAL),--no-build --pull never,--build)

down: ## stop the stack; its data stays
	$(COMPOSE) down

ps: ## the stack's containers and their health
	$(COMPOSE) ps --all

stack-logs: ## follow the stack's logs (SERVICE=api: of one)
	$(COMPOSE) logs --follow --tail 200 $(SERVICE)

build-images: ## build the images of the container tests (installs and starts the engine on Debian, as root)
	python3 tests/containers/build.py

test-containers: $(VENV)/.installed-dev build-images ## the stack's tests in real containers
	$(PY) -m pytest tests/containers

pins-verify: ## ask the registries whether the pinned images are still what their tags say
	python3 compose/pins_verify.py
