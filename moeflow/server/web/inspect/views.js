// The views of the inspector, in their order. Each module is loaded when its view is first opened.
//
// The default export of a module is a class:
//   constructor(element, context)  builds its content in `element`; for `context` see app.js.
//   update(signal)                 asks the server and draws; called again after `static periodMs`.
//   open(argument)                 shows one thing, such as a request by its id. Optional.
//   hide()                         is called when another view opens, or the inspector closes. Optional.

export const VIEWS = [
  { id: "experts", title: "Experts", load: () => import("./experts/experts_view.js") },
  { id: "timeline", title: "Time line", load: () => import("./timeline/timeline_view.js") },
  { id: "speed", title: "Speed & memory", load: () => import("./speed/speed_view.js") },
  { id: "requests", title: "Requests", load: () => import("./requests/requests_view.js") },
  { id: "jobs", title: "Jobs", load: () => import("./jobs/jobs_view.js") },
  { id: "models", title: "Models", load: () => import("./models/models_view.js") },
  { id: "machines", title: "Machines", load: () => import("./machines/machines_view.js") },
  { id: "log", title: "Log", load: () => import("./log/log_view.js") },
];
