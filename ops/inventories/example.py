"""One VM. Copy this to prod.py (it stays out of git), fill it in, and run `make deploy`."""

hosts = [
    (
        # the VM's name or address, for SSH
        "203.0.113.10",
        {
            "ssh_user": "root",  # or a user who may sudo without a password
            # "ssh_key": "~/.ssh/id_ed25519",
            # A domain that points to the VM; ports 80 and 443 have to be open. Without one: "address": "203.0.113.10",
            # and caddy signs with an authority of its own, which clients have to trust.
            "domain": "memory.example.com",
            # Secrets are made on the VM and stay there. One that you have already is named by where it is on this
            # machine, never by its value: env:NAME, file:PATH, command:COMMAND.
            "secrets": {
                # "DATABASE_URL": "command:pass show neon/warmstart",   # with "postgres": False
                # "RESTIC_PASSWORD": "file:~/.secrets/warmstart-restic",
            },
            # A second place for backups; its credentials are secrets, too (AWS_ACCESS_KEY_ID, …).
            # "backup": {"offsite": "s3:https://s3.example.com/warmstart-backups"},
            # Who is told when something breaks; without it nothing watches.
            # "alerts": {"webhook": "https://hooks.example.com/warmstart"},
            # A VM without a way to image registries: images come from this machine over SSH.
            # "images": "carry",
            # The embedding model from a folder of this machine instead of from the model hub.
            # "model": "~/models/multilingual-e5-small",
            # Settings of compose/.env.example.
            # "settings": {"RATE_LIMIT_PER_MINUTE": "1200"},
        },
    )
]
