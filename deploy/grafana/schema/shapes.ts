// What a dashboard of ours may be: Grafana's types, narrowed by the type of each panel, with its Prometheus query.
import type { Dashboard, DataQuery, FieldConfig, Panel, RowPanel, AnnotationQuery } from '@grafana/schema';
import type * as Bars from '@grafana/schema/dist/esm/raw/composable/barchart/panelcfg/x/BarChartPanelCfg_types.gen';
import type * as HeatMap from '@grafana/schema/dist/esm/raw/composable/heatmap/panelcfg/x/HeatmapPanelCfg_types.gen';
import type * as Stat from '@grafana/schema/dist/esm/raw/composable/stat/panelcfg/x/StatPanelCfg_types.gen';
import type * as Table from '@grafana/schema/dist/esm/raw/composable/table/panelcfg/x/TablePanelCfg_types.gen';
import type * as Lines from '@grafana/schema/dist/esm/raw/composable/timeseries/panelcfg/x/TimeSeriesPanelCfg_types.gen';

// JSON has strings where the types have string enums: an enum becomes the union of its values. Everything else stays.
type Plain<T> = unknown extends T ? unknown
  : T extends string ? `${T}`
  : T extends number | boolean | null | undefined ? T
  : T extends Array<infer Item> ? Array<Plain<Item>>
  : { [Key in keyof T]: Plain<T[Key]> };

// Of the data source's plugin, which is not in the package.
interface PrometheusQuery extends DataQuery {
  expr: string;
  legendFormat?: string;
  format: 'time_series' | 'table' | 'heatmap';
  instant: boolean;
  range: boolean;
  exemplar?: boolean;
}

type Closed<T> = { [Key in keyof T as string extends Key ? never : Key]: T[Key] };

interface Typed<Type extends string, Options, Custom>
  extends Omit<Panel, 'type' | 'options' | 'fieldConfig' | 'targets' | 'gridPos' | 'id'> {
  type: Type;
  id: number;
  title: string;
  description: string;
  gridPos: NonNullable<Panel['gridPos']>;
  targets: PrometheusQuery[];
  options: Options;
  fieldConfig: {
    defaults: Omit<FieldConfig, 'custom'> & { unit: string; custom: Custom };
    overrides: NonNullable<Panel['fieldConfig']>['overrides'];
  };
}

type OurPanel =
  | Typed<'stat', Stat.Options, Record<string, never>>
  | Typed<'timeseries', Lines.Options, Closed<Lines.FieldConfig>>
  | Typed<'heatmap', HeatMap.Options, Closed<HeatMap.FieldConfig>>
  | Typed<'barchart', Bars.Options, Closed<Bars.FieldConfig>>
  | Typed<'table', Table.Options, Record<string, never>>
  | (RowPanel & { title: string; panels: [] });

interface Alerts extends Omit<AnnotationQuery, 'target'> {
  target: { refId: string; expr: string };
  titleFormat: string;
  textFormat: string;
}

interface OurDashboard extends Omit<Dashboard, 'panels' | 'annotations'> {
  uid: string;
  title: string;
  panels: OurPanel[];
  annotations: { list: Alerts[] };
}

export type DashboardFile = Plain<OurDashboard>;
