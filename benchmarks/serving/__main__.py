from benchmarks.serving.command import app

app(prog_name="python -m benchmarks.serving")
