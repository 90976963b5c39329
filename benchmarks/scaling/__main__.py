from benchmarks.scaling.command import app

app(prog_name="python -m benchmarks.scaling")
