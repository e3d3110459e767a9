"""Score a checkpoint on held-out samples: python jobs/evaluate.py jobs/configs/scenes.yaml"""

from _entry import run

if __name__ == "__main__":
    run("evaluate")
