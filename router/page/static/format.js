// Numbers for people: three digits that matter, and a unit.

const DASH = "–";

const known = (value) => typeof value === "number" && Number.isFinite(value);

/** Seconds as milliseconds, seconds or minutes. */
export function duration(seconds) {
  if (!known(seconds)) return DASH;
  if (seconds < 0.0095) return `${(seconds * 1000).toFixed(1)} ms`;
  if (seconds < 0.9995) return `${(seconds * 1000).toFixed(0)} ms`;
  if (seconds < 9.995) return `${seconds.toFixed(2)} s`;
  if (seconds < 119.5) return `${seconds.toFixed(0)} s`;
  return `${Math.floor(seconds / 60)} min`;
}

export function count(value) {
  if (!known(value)) return DASH;
  if (value < 10 && !Number.isInteger(value)) return value.toFixed(1);
  if (value < 10_000) return Math.round(value).toLocaleString("en-US");
  return value < 1e6 ? `${(value / 1e3).toFixed(value < 1e5 ? 1 : 0)} k` : `${(value / 1e6).toFixed(1)} M`;
}

export function percent(share) {
  return known(share) ? `${Math.round(share * 100)} %` : DASH;
}

export function bytes(value) {
  if (!known(value)) return DASH;
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let unit = 0;
  while (value >= 1024 && unit < units.length - 1) {
    value /= 1024;
    unit += 1;
  }
  return `${value < 10 && unit ? value.toFixed(1) : value.toFixed(0)} ${units[unit]}`;
}

/** Time of day of the reader's clock. */
export function clock(unixSeconds) {
  return new Date(unixSeconds * 1000).toLocaleTimeString("en-GB");
}
