"""What the commands of the command line do, one module each; heavy imports happen inside functions."""
