// The parts of the page, one line each; the server says which of them exist.

import { part, start } from "./shell.js";

part("home", "Home", () => import("./home.js"));
part("play", "Play", () => import("./play.js"));
part("runs", "Runs", () => import("./runs.js"));
part("read", "Read", () => import("./read.js"));
part("time", "Through time", () => import("./time.js"));
part("data", "Data", () => import("./data.js"));
part("model", "Model", () => import("./model.js"));
part("start", "Start", () => import("./start.js"));

start(document.getElementById("app"));
