"""Show the layout for a cluster and for what is left of it: python jobs/plan.py jobs/configs/scenes.yaml --nodes 4x2"""

from _entry import run

if __name__ == "__main__":
    run("plan")
