"""Write a checkpoint as a Hugging Face directory: python jobs/export.py /shared/runs/scenes --to /shared/scenes-hf"""

from _entry import run

if __name__ == "__main__":
    run("checkpoint export")
