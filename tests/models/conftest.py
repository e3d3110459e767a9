from tests.engine.conftest import pool as pool
