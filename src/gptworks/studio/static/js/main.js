// The parts of the page, one line each; the server says which of them exist.

import { part, start } from "./shell.js";

const OF_RUN = { ofRun: true };

part("home", "Home", () => import("./home.js"));
part("play", "Play", () => import("./play.js"), OF_RUN);
part("runs", "Runs", () => import("./runs.js"));
part("read", "Read", () => import("./read.js"), OF_RUN);
part("time", "Through time", () => import("./time.js"), OF_RUN);
part("data", "Data", () => import("./data.js"), OF_RUN);
part("model", "Model", () => import("./model.js"), OF_RUN);
part("start", "Start", () => import("./start.js"));

start(document.getElementById("app"));
