"""What runs on the VM, as root, with Debian's Python alone: `warmstart-vm <command>`.

It is laid down as releases/<id>/vm, and is a package there (`vm`) as it is here (`ops.vm`): modules import one
another relatively, `from .stack import Stack`.
"""
