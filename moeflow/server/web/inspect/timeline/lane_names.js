// The names of lanes and the causes of waits, as the user reads them. The engine has English ones.

import { textKey, tr } from "../../translate.js";

const LANES = {
  passes: textKey("passes"),
  attention: textKey("attention"),
  router: textKey("router"),
  experts: textKey("experts"),
  disk: textKey("disk"),
  ranks: textKey("ranks"),
  sampling: textKey("sampling"),
  compute: textKey("computing"),
  host: textKey("processor"),
  host_to_device: textKey("copies to device"),
  device_to_host: textKey("copies to host"),
  host_to_pinned: textKey("copies to pinned memory"),
  between_devices: textKey("sums of devices"),
};
const CAUSES = {
  "waits for experts": textKey("waits for experts"),
  "waits for other ranks": textKey("waits for other ranks"),
};

/** A lane's name; with several engines behind that of its engine. */
export function laneName(lane, hasEngines = false) {
  const name = tr(LANES[lane.name] ?? lane.name);
  return hasEngines ? `${lane.engine}: ${name}` : name;
}

export const causeName = (cause) => tr(CAUSES[cause] ?? cause);
